"""Draft tokens found in earlier outputs are counted separately, and are unreachable under another salt."""

import pytest

from specdec import SamplingParams, SpecEngine

PROMPT = "class Parser:\n    def "


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_found_only_in_earlier_outputs_are_counted_separately(graphs: bool) -> None:
    """The host also looks up before device steps; what a head drafts there is never looked up."""
    fixed = {"adaptive": False, "topk": 1, "num_steps": 6, "graphs": graphs, "dtype": "float32"}
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=5, ignore_eos=True)
    salted = params.model_copy(update={"cache_salt": "another"})
    with SpecEngine("tiny", draft="suffix", **fixed) as engine:
        first, again, apart = (engine.generate(PROMPT, own)[0] for own in (params, params, salted))
    assert first.text == again.text == apart.text
    assert first.stats.accepted_from_outputs == apart.stats.accepted_from_outputs == 0
    assert apart.stats.cached_tokens == 0
    assert first.stats.accepted == apart.stats.accepted, "it drafts as if nothing had been written before"
    assert 24 < again.stats.accepted_from_outputs <= again.stats.accepted


def test_a_request_that_stops_inside_a_draft_counts_its_accepted_tokens() -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    fixed = {"adaptive": False, "topk": 1, "num_steps": 16, "num_draft_tokens": 17, "dtype": "float32"}
    with SpecEngine("tiny", draft="suffix", **fixed) as engine:
        (once,) = engine.generate(PROMPT, params)
        stop = once.token_ids[20]
        (cut,) = engine.generate(PROMPT, params.model_copy(update={"stop_token_ids": [stop]}))
        total = engine.model.loop.counts.accepted_from_outputs
    assert len(cut.token_ids) <= 21 and cut.token_ids[-1] == stop
    assert 0 < cut.stats.accepted_from_outputs <= cut.stats.accepted < len(cut.token_ids)
    assert total == cut.stats.accepted_from_outputs


def test_nothing_is_looked_up_where_a_head_drafts() -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with SpecEngine("tiny", draft="mtp", adaptive=False, topk=1, num_steps=3) as engine:
        for _ in range(2):
            (done,) = engine.generate(PROMPT, params)
    assert done.stats.accepted > done.stats.accepted_from_outputs == 0
