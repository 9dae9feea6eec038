"""4,000 tokens in windows of drafts leave the state that they leave when each is read by itself."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from specdec import SamplingParams, SpecEngine
from specdec.core.batch import StepReport
from tests.draft.oracle import Oracle
from tests.tolerances import DRIFT_FLOAT32

TOKENS, PROMPT = 4000, (1, 2, 3)
LENGTH = 4096
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=3, ignore_eos=True)


def run(
    engine: SpecEngine, prompt: Sequence[int], params: SamplingParams
) -> tuple[Sequence[int], list[Tensor]]:
    """Complete a prompt; return its tokens and all layers' states when the last of them but one was read."""
    loop, states = engine.model.loop, list[Tensor]()

    def copy_states(report: StepReport) -> None:
        for request in report.finished:
            loop.scheduler.reclaim()
            assert request.committed and not request.committed.path
            assert request.num_computed_tokens == len(request.tokens) - 1
            for layer in range(len(engine.model.settings.layout.states)):
                states.append(loop.arena.recurrent(layer).state_SHKW[request.committed.state].clone())

    loop.observers.append(copy_states)
    done = engine.generate([prompt], params)[0]
    assert len(states) == len(engine.model.settings.layout.states)
    return [*prompt, *done.token_ids], states


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(max_position_embeddings=LENGTH)


@pytest.mark.parametrize("kernels", ["auto", "cpu"])
def test_the_state_after_4000_tokens_of_drafts(folder: Path, kernels: str) -> None:
    fields: dict[str, Any] = {
        "dtype": "float32",
        "kernels": kernels,
        "max_model_len": LENGTH,
        "max_running": 1,
    }
    with SpecEngine(folder, draft="none", **fields) as engine:
        truth, expected = run(engine, PROMPT, PARAMS)
    shape: dict[str, Any] = {"num_steps": 5, "topk": 3, "num_draft_tokens": 18}
    with SpecEngine(folder, draft="ngram", adaptive=False, **shape, **fields) as engine:
        speculation = engine.model.loop.speculation
        speculation.drafters.clear()
        speculation.add_drafter(Oracle([truth], vocab=320, rate=0.8))
        said, found = run(engine, PROMPT, PARAMS)
        counts = engine.model.loop.counts
    assert len(said) == TOKENS + len(PROMPT) and counts.accepted > TOKENS / 3
    print(f"steps by accepted tokens: {dict(sorted(counts.histogram.items()))}")
    assert all(counts.histogram[accepted] > 50 for accepted in range(5))
    if said != truth:  # rounding decided between two tokens: read what was said, a token at a time
        with SpecEngine(folder, draft="none", chunk_tokens=1, **fields) as engine:
            _, expected = run(engine, said[:-1], PARAMS.model_copy(update={"max_tokens": 1}))
    drifts = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    print(f"after {TOKENS} tokens: {', '.join(f'{drift:.1e}' for drift in drifts)}")
    assert max(drifts) < DRIFT_FLOAT32
