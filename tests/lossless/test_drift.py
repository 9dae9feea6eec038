"""The state after thousands of tokens in draft windows equals the state after decoding them one by one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SamplingParams, SpecEngine
from specdec.core.batch import StepReport
from tests.draft.oracle import Oracle
from tests.models.agreeing import VOCAB, write_agreeing
from tests.models.random_checkpoints import edit_config
from tests.models.representatives import REPRESENTATIVES, parts
from tests.selection import EXHAUSTIVE, only
from tests.tolerances import DRIFT_FLOAT32

PROMPT, LENGTH = (1, 2, 3), 4096
CASES = [
    *(("qwen3_5", kernels, 4000) for kernels in ("auto", "cpu")),
    *((family, "auto", 1000) for family in REPRESENTATIVES[1:] if (True, False) not in parts(family)),
]
"""A long text, and a shorter one for every other recurrent mixer."""


def run(
    engine: SpecEngine, prompt: Sequence[int], params: SamplingParams
) -> tuple[Sequence[int], list[Tensor]]:
    """Complete a prompt; return its tokens and all layers' states after the second to last token."""
    loop, states = engine.model.loop, list[Tensor]()

    def copy_states(report: StepReport) -> None:
        for request in report.finished:
            loop.scheduler.reclaim()
            assert request.committed and not request.committed.path
            assert request.num_computed_tokens == len(request.tokens) - 1
            for layer in range(len(engine.model.settings.layout.states)):
                memory, slot = loop.arena.recurrent(layer), request.committed.state
                states.append(torch.cat([x[slot].flatten() for x in (memory.state_SHKW, memory.window_SIC)]))

    loop.observers.append(copy_states)
    done = engine.generate([prompt], params)[0]
    assert len(states) == len(engine.model.settings.layout.states)
    return [*prompt, *done.token_ids], states


@EXHAUSTIVE
@pytest.mark.parametrize(("family", "kernels", "tokens"), only({CASES[0]}, CASES))
def test_the_state_after_thousands_of_tokens_of_drafts(
    family: str, kernels: str, tokens: int, tmp_path: Path
) -> None:
    write_agreeing(tmp_path, family)
    edit_config(tmp_path, max_position_embeddings=LENGTH)
    params = SamplingParams(max_tokens=tokens, temperature=0.8, seed=3, ignore_eos=True)
    fields: dict[str, Any] = {
        "dtype": "float32",
        "kernels": kernels,
        "max_model_len": LENGTH,
        "max_running": 1,
    }
    with SpecEngine(tmp_path, draft="none", **fields) as engine:
        truth, expected = run(engine, PROMPT, params)
    shape: dict[str, Any] = {"num_steps": 5, "topk": 3, "num_draft_tokens": 18}
    with SpecEngine(tmp_path, draft="ngram", adaptive=False, **shape, **fields) as engine:
        speculation = engine.model.loop.speculation
        speculation.drafters.clear()
        speculation.add_drafter(Oracle([truth], vocab=VOCAB, rate=0.8))
        said, found = run(engine, PROMPT, params)
        counts = engine.model.loop.counts
    assert len(said) == tokens + len(PROMPT) and counts.accepted > tokens / 3
    print(f"steps by accepted tokens: {dict(sorted(counts.histogram.items()))}")
    assert all(counts.histogram[accepted] > tokens / 100 for accepted in range(5))
    if said != truth:  # rounding decided a near tie: decode the actual output token by token
        with SpecEngine(tmp_path, draft="none", chunk_tokens=1, **fields) as engine:
            _, expected = run(engine, said[:-1], params.model_copy(update={"max_tokens": 1}))
    drifts = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    print(f"after {tokens} tokens: {', '.join(f'{drift:.1e}' for drift in drifts)}")
    assert max(drifts) < DRIFT_FLOAT32
