"""Where a text differs from what plain decoding says: rounding, or a fault that withholds every figure."""

from collections.abc import Sequence

import torch

from specdec.bench.acceptance.measure import Answer, Asked
from specdec.bench.throughput import EXCUSED_GAP
from specdec.config.sampling import SamplingParams
from specdec.errors import EngineError
from specdec.setup.build import Model
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window
from specdec.verify.choose import Chooser, Node, perturb

OWNER = "differing"


def differ(plain: Answer, other: Answer) -> bool:
    return plain.token_ids != other.token_ids


def require_rounding(
    model: Model, setting: str, asked: Asked, params: SamplingParams, plain: Answer, other: Answer
) -> None:
    """Raise unless two tokens nearly tie where the texts part; `model` is an idle engine to ask."""
    gap = gap_between(model, asked.ids, params, plain.token_ids, other.token_ids)
    if not gap <= EXCUSED_GAP:
        raise EngineError(
            f"{setting} says something else than draft none to {asked.category} {asked.name!r}: where the "
            f"texts part, its token lies {gap:.2g} of the largest logit under the best, and rounding "
            f"explains {EXCUSED_GAP:g}; no figure is shown for a result that is wrong"
        )


@torch.inference_mode()
def gap_between(
    model: Model, prompt: Sequence[int], params: SamplingParams, plain: Sequence[int], other: Sequence[int]
) -> float:
    """Return how far apart, in what is compared, two texts' tokens lie where they part.

    Relative to the largest logit; an engine's memory is borrowed for the time.
    """
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return float("inf")  # one goes on where the other ends: no rounding does that
    tokens, arena, network = [*prompt, *plain[:at]], model.loop.arena, model.network
    blocks = arena.take_blocks(OWNER, arena.layout.blocks_for(len(tokens)))
    state = arena.take_state(OWNER) if arena.layout.states else 0
    assert blocks is not None and state is not None
    row = Row(TokenTree.chain(tokens), 0, torch.tensor(blocks, dtype=torch.int64), state)
    hidden_TD = network.forward(build_window([row], arena.layout.conv_width, model.loop.device), arena)
    logits_1V = network.logits(hidden_TD[-1:])
    arena.release_owner(OWNER)
    assert params.seed is not None
    chooser = Chooser(params, seed=params.seed, prompt=prompt, vocab=network.spec.vocab)
    score_V = perturb(logits_1V, [Node(chooser, len(tokens))], network.kernels)[0]
    return float((score_V[plain[at]] - score_V[other[at]]).abs() / logits_1V.abs().max())
