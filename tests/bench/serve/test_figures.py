import asyncio
import time
from itertools import pairwise

import pytest

from specdec.bench.acceptance.prompts import BenchPrompt
from specdec.bench.options import ServeOptions
from specdec.bench.serve import load
from specdec.bench.serve.load import ConcurrencyLevel, LoadJob, arrivals, drive
from specdec.bench.serve.report import level_report
from specdec.bench.serve.run import plan
from specdec.bench.serve.speculation import gauge, has_gauge, read_metrics, told
from specdec.bench.serve.stream import (
    DraftCounts,
    RequestOutcome,
    ServerUnderTest,
    StreamedAnswer,
    UnusableAnswer,
)

PROMPTS = [BenchPrompt("code", str(i), f"prompt {i}") for i in range(10)]


def outcome(start_s: float, *chunk_s: float, tokens: int, failure: str | None = None) -> RequestOutcome:
    return RequestOutcome(start_s, chunk_s, chunk_s[-1] + 0.5, tokens, "usage", None, failure)


def test_figures_cover_completed_requests_only() -> None:
    level = ConcurrencyLevel(2, [], [LoadJob(PROMPTS[0], 0)] * 3, 0, start_s=10.0)
    level.outcomes = [
        outcome(10.0, 10.2, 10.4, 11.0, tokens=5),
        outcome(10.0, 10.4, 12.4, tokens=11),
        outcome(11.0, 11.1, 14.5, tokens=99, failure="it broke"),
    ]
    report = level_report(level)
    assert (report["completed"], report["failed"], report["failures"]) == (2, 1, {"it broke": 1})
    assert report["seconds"] == 5.0
    assert (report["output_tokens"], report["output_tokens_per_s"]) == (16, 16 / 5)
    assert report["requests_per_s"] == 2 / 5
    assert report["ttft_s"]["median"] == pytest.approx(0.3)
    assert report["ttft_s"]["p90"] == pytest.approx(0.38)
    # 0.8 s for 4 tokens after the first, and 2 s for 10.
    assert report["inter_token_s"]["median"] == pytest.approx(0.2)
    assert report["chunk_gap_s"]["median"] == pytest.approx(0.6)
    assert report["end_to_end_s"]["median"] == pytest.approx((1.5 + 2.9) / 2)
    assert report["tokens_per_chunk"] == 16 / 5


def test_level_of_failures_alone_has_no_times() -> None:
    level = ConcurrencyLevel(1, [], [LoadJob(PROMPTS[0], 0)], 0, [outcome(0.0, 1.0, tokens=0, failure="x")])
    report = level_report(level)
    assert report["ttft_s"] is report["inter_token_s"] is report["end_to_end_s"] is None
    assert report["output_tokens_per_s"] == 0


COUNTERS = """
vllm:spec_decode_num_drafts_total{engine="0"} 10 1700000000
vllm:spec_decode_num_drafts_total{engine="1"} 10
vllm:spec_decode_num_draft_tokens_total{engine="0"} 60
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 25
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 15
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 10
"""


def test_counters_are_added_over_engines_and_compared_before_and_after() -> None:
    after = read_metrics(COUNTERS)
    speculation = told([], {}, after, [])
    assert speculation is not None
    assert speculation.acceptance_length == 1 + 25 / 20
    assert speculation.per_depth == (15 / 20, 10 / 15)
    assert told([], after, after, []) is None
    # A server that restarted in between has lower counters than before.
    assert told([], {key: value + 100 for key, value in after.items()}, after, []) is None


def test_gauge_leaves_replicas_at_rest_out() -> None:
    name = "sglang:spec_accept_length"
    metrics = read_metrics(f'{name}{{r="0"}} 3.0\n{name}{{r="1"}} 2.0\n{name}{{r="2"}} 0.0')
    assert gauge(metrics) == 2.5
    at_rest = read_metrics(f"{name} 0.0")
    assert has_gauge(at_rest) and gauge(at_rest) is None
    assert not has_gauge(read_metrics("sglang:spec_accept_length_bucket 3"))


def test_request_statistics_take_precedence_over_counters_and_counters_over_gauges() -> None:
    streamed = [RequestOutcome(0, (1.0,), 2.0, 10, "usage", DraftCounts(9, 6), None)]
    silent = [RequestOutcome(0, (1.0,), 2.0, 10, "usage", None, None)]
    after = read_metrics(COUNTERS)
    kinds = [
        told(streamed, {}, after, [2.0]),
        told(silent, {}, after, [2.0]),
        told(silent, {}, {}, [2.0, 4.0, 3.0]),
    ]
    lengths = [kind.acceptance_length for kind in kinds if kind]
    assert [kind.per_depth for kind in kinds if kind] == [(15 / 20, 10 / 15)] * 2 + [()]
    assert lengths == [10 / 4, 1 + 25 / 20, 3.0]
    assert told(silent, {}, {}, []) is None


def test_openais_own_count_of_predictions_is_read() -> None:
    answer = StreamedAnswer()
    details = '{"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}'
    answer.take(f'{{"usage": {{"completion_tokens": 8, "completion_tokens_details": {details}}}}}', 0.0)
    assert (answer.drafts, answer.counts) == (DraftCounts(5, 3), {"usage": 8})
    silent = StreamedAnswer()
    details = details.replace("3", "0").replace("2}", "0}")
    silent.take(f'{{"usage": {{"completion_tokens": 8, "completion_tokens_details": {details}}}}}', 0.0)
    assert silent.drafts is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('{"object": "error", "message": "too long", "code": 400}', "too long"),
        ('{"error": "just words"}', "just words"),
        ('{"error": {"code": 7}}', '{"code": 7}'),
        ("[1]", "no JSON object"),
    ],
)
def test_stream_errors_are_parsed_in_every_format(data: str, words: str) -> None:
    with pytest.raises(UnusableAnswer) as caught:
        StreamedAnswer().take(data, 0.0)
    assert words in str(caught.value)


def test_thoughts_and_tools_count_as_text_and_openings_do_not() -> None:
    answer = StreamedAnswer()
    for delta in (
        '{"role": "assistant", "content": ""}',
        '{"reasoning_content": "hm"}',
        '{"tool_calls": [{}]}',
        "{}",
    ):
        answer.take(f'{{"choices": [{{"delta": {delta}}}]}}', 1.0)
    assert len(answer.chunk_s) == 2


def test_arrivals_are_a_poisson_process_that_the_seed_decides() -> None:
    times_s = [at_s for at_s in arrivals(4000, 20.0, seed=1) if at_s is not None]
    assert times_s[0] == 0
    assert times_s == sorted(times_s)
    gaps = [after - before for before, after in pairwise(times_s)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    # An exponential's standard deviation equals its mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert arrivals(4000, 20.0, seed=1) == times_s != arrivals(4000, 20.0, seed=2)
    assert arrivals(3, None, seed=1) == [None] * 3


def _plan(**changes: object) -> list[ConcurrencyLevel]:
    asked = {"url": "http://h", "concurrency": [1, 2], "requests": 4, "seed": 3, **changes}
    return plan(ServeOptions.model_validate(asked), PROMPTS)


def test_every_prompt_is_used_before_any_repeats() -> None:
    first, second = _plan()
    sent = [*first.warmup, *first.jobs, *second.warmup, *second.jobs]
    assert {job.prompt.name for job in sent[:10]} == {prompt.name for prompt in PROMPTS}
    assert (first.repeated, second.repeated) == (0, 1)
    assert [job.seed for job in sent] == list(range(3, 14))
    assert _plan() == _plan()
    assert _plan(seed=4)[0].jobs != first.jobs
    assert [len(level.jobs) for level in _plan(requests=None, concurrency=[2, 8])] == [16, 32]


class SlowServer(ServerUnderTest):
    """A server that takes the same time for every request, and counts concurrent ones."""

    def __init__(self) -> None:
        self.there = self.most = 0

    async def metrics(self) -> str | None:
        return None

    async def complete(
        self, prompt: BenchPrompt, seed: int, sending: int, due_s: float | None = None
    ) -> RequestOutcome:
        self.there += 1
        self.most = max(self.most, self.there)
        start_s = time.perf_counter() if due_s is None else due_s
        await asyncio.sleep(0.02)
        self.there -= 1
        return RequestOutcome(start_s, (), time.perf_counter(), 0, "usage", None, None)


def test_every_place_is_taken_and_no_more() -> None:
    server, heard = SlowServer(), []
    level = ConcurrencyLevel(3, [], [LoadJob(prompt, 0) for prompt in PROMPTS], 0)
    asyncio.run(drive(server, level, lambda: heard.append(1)))
    assert server.most == 3
    assert len(level.outcomes) == len(heard) == 10


def test_waiting_time_counts_from_arrival() -> None:
    level = ConcurrencyLevel(1, [], [LoadJob(prompt, 0, due_s=0.0) for prompt in PROMPTS[:4]], 0)
    asyncio.run(drive(SlowServer(), level, lambda: None))
    assert {outcome.start_s for outcome in level.outcomes} == {level.start_s}
    late = ConcurrencyLevel(4, [], [LoadJob(prompt, 0, due_s=0.05) for prompt in PROMPTS[:4]], 0)
    asyncio.run(drive(SlowServer(), late, lambda: None))
    assert all(outcome.end_s >= late.start_s + 0.05 for outcome in late.outcomes)


def test_gauge_is_polled_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "READING_S", 0.002)

    class Gauged(SlowServer):
        async def metrics(self) -> str | None:
            return f"sglang:spec_accept_length {3.0 if self.there else 0.0}"

    level = ConcurrencyLevel(1, [], [LoadJob(prompt, 0) for prompt in PROMPTS[:3]], 0)
    asyncio.run(drive(Gauged(), level, lambda: None))
    assert level.speculation is not None
    assert level.speculation.acceptance_length == 3.0
