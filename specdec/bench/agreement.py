"""Decide when differing tokens are wrong: with exact dtypes. With others, correct engines often differ."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.config.sampling import SamplingParams
from specdec.errors import EngineError
from specdec.models.formats import QuantisationConfig
from specdec.setup.build import LoadedModel
from specdec.setup.settings import Resolved
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row
from specdec.verify.sampler import SamplingNode, TokenSampler, perturb

EXACT = (torch.float32, torch.float64)
EXCUSED_GAP = 1e-4
"""How far under the best logit a float32 or float64 token may lie, relative to the largest: correct
implementations round differently, and either token may win a tie this close."""
SAME_MODEL = 0.05
"""Largest mean gap of a peer's tokens, relative to the largest logit, that rounding explains."""
SAME_BITS = 1.5
"""Largest ratio to this engine's own gap in the same precision: with 4-bit random weights, tokens lie half as
far under the best logit as an arbitrary token."""
OWNER = "agreement"
_WIDTHS = {"fp8": "8-bit", "int8": "8-bit", "int4": "4-bit"}


def rounding(settings: Resolved, stored: QuantisationConfig | None = None) -> str:
    """Name the coarse rounding that makes token differences informational; empty if there is none.

    `stored` is the checkpoint's own weight format, if quantized: other engines multiply such weights
    differently.
    """
    found = [] if settings.dtype in EXACT else [str(settings.dtype).removeprefix("torch.")]
    if form := settings.quantize or (stored and stored.name):
        found.append(f"{_WIDTHS.get(form, form)} weights")
    if settings.layout.kv_dtype is not None:
        found.append("8-bit keys and values")
    return " and ".join(found)


def agreement(gap_BT: Tensor) -> dict[str, float]:
    """Count the tokens with the best logit, and measure how far the others lie under it."""
    return {
        "tokens": gap_BT.numel(),
        "equal": int((gap_BT == 0).sum()),
        "largest_gap": float(gap_BT.max()),
        "mean_gap": float(gap_BT.mean()),
    }


def require_same_model(name: str, peer: Mapping[str, float], own: Mapping[str, float], oracle: str) -> None:
    """Raise if a peer's tokens are those of another model, judged by its gaps and this engine's."""
    most = max(SAME_MODEL, SAME_BITS * own["mean_gap"])
    if not peer["mean_gap"] <= most:
        raise EngineError(
            f"{name}: its tokens lie {peer['mean_gap']:.2g} of the largest logit under the best of {oracle} "
            f"on average, and the same model in the same bits explains {most:.2g}; no figure is shown",
            field="peers",
        )


def require_rounding(
    model: LoadedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    plain: Sequence[int],
    other: Sequence[int],
    what: str,
) -> None:
    """Raise unless the tokens nearly tie where two texts diverge; `model` must be idle."""
    gap = gap_between(model, prompt, params, plain, other)
    if not gap <= EXCUSED_GAP:
        raise EngineError(
            f"{what}: where the texts part, the tokens lie {gap:.2g} of the largest logit apart, and "
            f"rounding explains {EXCUSED_GAP:g}; no figure is shown for a result that is wrong"
        )


@torch.inference_mode()
def last_logits(model: LoadedModel, tokens: Sequence[int], count: int) -> Tensor:
    """Compute the logits that predict each of a text's last tokens, in one pass; the engine must be idle."""
    arena, executor = model.loop.arena, model.loop.executor
    blocks = arena.take_blocks(OWNER, arena.layout.blocks_for(len(tokens)))
    state = arena.take_state(OWNER) if arena.layout.states else 0
    assert blocks is not None and state is not None
    row = Row(TokenTree.chain(tokens), 0, torch.tensor(blocks, dtype=torch.int64), state)
    logits_TV = executor.logits(executor.forward([row], ()).hidden_TD[-count:])
    arena.release_owner(OWNER)
    return logits_TV


def gaps(logits_TV: Tensor, output: Sequence[int]) -> Tensor:
    """Return how far each chosen token lies under the best logit, relative to the largest; 0 for the best."""
    logits_TV = logits_TV.float()
    chosen_T1 = torch.tensor(output, device=logits_TV.device)[:, None]
    gap_T = logits_TV.amax(-1) - logits_TV.gather(1, chosen_T1)[:, 0]
    return gap_T / logits_TV.abs().amax(-1)


@torch.inference_mode()
def gap_between(
    model: LoadedModel,
    prompt: Sequence[int],
    params: SamplingParams,
    plain: Sequence[int],
    other: Sequence[int],
) -> float:
    """Return the score gap between two texts' tokens where they diverge, relative to the largest logit."""
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return float("inf")  # one text ends where the other continues: rounding cannot explain that
    tokens = [*prompt, *plain[:at]]
    logits_1V = last_logits(model, tokens, 1)
    assert params.seed is not None
    chooser = TokenSampler(params, seed=params.seed, prompt=prompt, vocab=model.network.spec.vocab)
    score_V = perturb(logits_1V, [SamplingNode(chooser, len(tokens))], model.network.kernels)[0]
    return float((score_V[plain[at]] - score_V[other[at]]).abs() / logits_1V.abs().max())
