"""The first drafts after a prompt was handed over: with what the head knows of it, and without."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from specdec.bench.options import ReachOptions
from specdec.bench.reach.requests import Requests
from specdec.bench.report import summarise
from specdec.config.engine import EngineConfig
from specdec.config.sampling import SamplingParams
from specdec.config.tenant import SOLE
from specdec.engine.engine import SpecEngine
from specdec.errors import EngineError
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import network

PROMPTS, STEPS, LONG_STEP = 16, 32, 4
"""Prompts, the verify steps of each that are counted, and tokens that a long one of these gains."""
LIMIT_S = 600.0
ONE, WARM, COLD = "one engine", "handed over", "handed over without the head's memory"


def measure_drafts(
    options: ReachOptions, config: EngineConfig, requests: Requests, on_prompt: Callable[[], object]
) -> dict[str, Any] | None:
    """Return the tokens a step gains after each way to begin; None for a model without a head of its own.

    The ways must give one text. The head drafts alone, always, and chains: a tree's shape depends on what
    earlier requests accepted.
    """
    spec = network(Checkpoint(options.model).config)
    if not spec.mtp:
        return None
    own = EngineConfig.of(config, {"draft": "mtp", "adaptive": False, "topk": 1, "prefix_cache": True})
    lengths: dict[str, list[float]] = {ONE: [], WARM: [], COLD: []}
    with closing(SpecEngine(options.model, own)) as reader, closing(SpecEngine(options.model, own)) as writer:
        head = head_layers(writer)
        for _ in range(PROMPTS):
            prompt = requests.draw(options.prompt_tokens, 1)["prompt"]
            answers = set()
            for name, found in lengths.items():
                reader.flush()
                writer.flush()
                if name != ONE:
                    hand_over(reader, writer, prompt, forget=head if name == COLD else ())
                ids, length, cached = first_steps(writer, prompt)
                if cached != (0 if name == ONE else len(prompt) - 1):
                    raise EngineError(
                        f"{name}: {cached} tokens of {len(prompt)} were cached; no figure is shown"
                    )
                answers.add(ids)
                found.append(length)
            if len(answers) > 1:
                raise EngineError("a prompt that was handed over is answered otherwise; no figure is shown")
            on_prompt()
    return {name: summarise(found)._asdict() for name, found in lengths.items()}


def head_layers(engine: SpecEngine) -> range:
    """Return which of the arena's attention layers are the head's: they stand behind the model's."""
    spec, layers = engine.model.network.spec, len(engine.transfers.arena.layout.kv)
    own = sum(mixer.kv_shape() is not None for layer in spec.mtp for mixer in layer.mixers)
    return range(layers - own, layers)


def hand_over(
    reader: SpecEngine, writer: SpecEngine, prompt: list[int], *, forget: Sequence[int] = ()
) -> None:
    """Prefill a prompt on one engine and decode on another, without these layers' memory or the head's."""
    landing = writer.transfers.begin_landing(prompt[:-1], SOLE).result(LIMIT_S)
    loan = reader.transfers.lend(reader.prepare(prompt, SamplingParams(max_tokens=1)))
    lent = loan.done.result(LIMIT_S)
    if landing is None:
        raise EngineError("so short a prompt is not handed over; give longer ones", field="prompt_tokens")
    there, here = reader.transfers.arena, writer.transfers.arena
    for source, own in zip(lent.blocks[len(landing.shared) :], landing.blocks, strict=True):
        here.block_bytes_X(own).copy_(there.block_bytes_X(source))
    if lent.state is not None and landing.state is not None:
        here.state_bytes_X(landing.state).copy_(there.state_bytes_X(lent.state))
    hidden_1D = lent.hidden_1D
    if forget:
        for layer in forget:
            here.pages(layer)[list(landing.blocks)] = 0
        hidden_1D = None if hidden_1D is None else torch.zeros_like(hidden_1D)
    loan.give_back()
    if not writer.transfers.land(landing, hidden_1D).result(LIMIT_S):
        raise EngineError("a prompt that was handed over was not kept; give the engine more memory")


def first_steps(engine: SpecEngine, prompt: list[int]) -> tuple[tuple[int, ...], float, int]:
    """Complete a prompt greedily; return its tokens, what its first verify steps gained each, and the hit.

    The last step of a prefill is no verify step.
    """
    params = SamplingParams(max_tokens=1 + STEPS * LONG_STEP, temperature=0.0, ignore_eos=True, trees=True)
    done = engine.generate([prompt], params)[0]
    steps = done.drafts[:STEPS]
    return (
        tuple(done.token_ids),
        sum(1 + len(step.accepted) for step in steps) / len(steps),
        done.stats.cached_tokens,
    )


def draft_rows(report: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for name, own in report.items():
        yield {
            "the head": name,
            "acceptance length": f"{own['median']:.2f}",
            "p10 / p90": f"{own['p10']:.2f} / {own['p90']:.2f}",
        }
