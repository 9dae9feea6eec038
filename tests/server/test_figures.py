"""Metrics of choices: their times and ends, and the engine's settings."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specdec import EngineConfig, SamplingParams
from specdec.core.outputs import Delta, RequestStats
from specdec.core.params import ValidatedParams
from specdec.core.scheduler import RESOURCES
from specdec.engine.engine import PreparedPrompt
from specdec.errors import CapacityError, EngineError
from specdec.models.folder import SHIPPED
from specdec.server.answers import NewOutput
from specdec.server.failures import Failure
from specdec.server.metrics import REASONS, Metrics, ModelMetrics
from specdec.setup.resolve import open_model
from tests.selection import EXHAUSTIVE
from tests.server.faulty import FILE
from tests.server.live import Live, total
from tests.server.test_guards import LONG, PLAIN, open_stream, running, wait_for

ROWS = 3
ENDLESS = LONG | {"n": ROWS, "max_tokens": 3500}
"""Takes a hundred times as long as the test's actions."""
ENGINE: dict[str, Any] = {"draft": "suffix", "dtype": "float32", "memory_bytes": 64 << 20, "max_running": 7}
PER_CHOICE = (
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
)
ASKED = (
    *(
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
    ),
    *("gpu_cache_usage_perc", "num_preemptions_total", "prompt_tokens_total", "prompt_tokens_cached_total"),
    *("generation_tokens_total", "request_success_total", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total"),
    *("engine_sleep_state", "cache_config_info", "spec_decode_num_drafts_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("time_per_output_token_seconds_bucket", "request_prefill_kv_computed_tokens_bucket"),
    *("iteration_tokens_total_bucket", "iteration_tokens_total_sum", "iteration_tokens_total_count"),
    *(f"{name}_bucket" for name in (*PER_CHOICE, "request_params_n", "request_max_num_generation_tokens")),
)
"""The metrics that vLLM's dashboards use."""
PER_PROMPT = ("request_params_n", "request_max_num_generation_tokens")


@pytest.fixture
def metrics() -> ModelMetrics:
    return Metrics([]).of("m")


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("told") / "fault"


@pytest.fixture(scope="module")
def live(fault: Path) -> Iterator[Live]:
    options = [word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with Live(*options, env={FILE: str(fault)}, entry="tests.server.faulty") as own:
        yield own


def value(metrics: ModelMetrics, name: str, **labels: str) -> float:
    found = metrics.shared.registry.get_sample_value(
        f"vllm:{name}", {"model_name": "m", "engine": "0", **labels}
    )
    assert found is not None
    return found


def ends(metrics: ModelMetrics) -> dict[str, float]:
    found = {why: value(metrics, "request_success_total", finished_reason=why) for why in REASONS}
    return {why: count for why, count in found.items() if count}


def ask(prompts: int = 1, n: int = 1) -> list[PreparedPrompt]:
    return [PreparedPrompt((1, 2, 3), ValidatedParams(SamplingParams(n=n, max_tokens=9)))] * prompts


def end(choice: int, at_s: float, stats: RequestStats) -> NewOutput:
    tokens = (5,) * stats.output_tokens
    return NewOutput(choice, Delta("", tokens, finish_reason="stop", stats=stats), ((at_s, len(tokens)),))


def test_a_choices_timestamps_come_from_the_engine_and_ascend(metrics: ModelMetrics) -> None:
    with metrics.request(ask(), 0.0) as watch:
        watch.start_s = 100.0
        watch.said(end(0, 108.0, RequestStats(3, 5, queued_s=1.0, first_token_s=3.0, total_s=7.0)))
    assert [value(metrics, f"{name}_sum") for name in PER_CHOICE] == [8, 1, 2, 4, 6, 1, 3, 5, 9, 3]
    assert all(value(metrics, f"{name}_count") == 1 for name in (*PER_CHOICE, *PER_PROMPT))


def test_concurrent_scrapes_share_a_text_rendered_after_their_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics, written = Metrics([]), list[int]()
    monkeypatch.setattr(metrics, "text", lambda: written.append(1) or b"%d" % len(written))

    async def scrape() -> None:
        assert await metrics.scrape() == b"1"
        metrics._rests_until_s = time.monotonic() + 0.1
        assert set(await asyncio.gather(*(metrics.scrape() for _ in range(100)))) == {b"2"}
        assert await metrics.scrape() == b"3"

    asyncio.run(scrape())


def test_a_choice_of_one_token_has_no_time_between_tokens(metrics: ModelMetrics) -> None:
    with metrics.request(ask(), 0.0) as watch:
        watch.said(end(0, 9.0, RequestStats(3, 1, queued_s=1.0, first_token_s=3.0, total_s=3.0)))
    assert value(metrics, "request_decode_time_seconds_count") == 1
    assert value(metrics, "request_time_per_output_token_seconds_count") == 0


def test_every_choice_is_a_request_and_every_prompt_has_its_longest(metrics: ModelMetrics) -> None:
    with metrics.request(ask(prompts=2, n=2), 0.0) as watch:
        for choice, tokens in enumerate((2, 6, 4, 3)):
            watch.said(end(choice, 9.0, RequestStats(3, tokens)))
            assert value(metrics, "request_params_n_count") == (choice + 1) // 2
    assert ends(metrics) == {"stop": 4}
    assert all(value(metrics, f"{name}_count") == 4 for name in (*PER_CHOICE, "time_to_first_token_seconds"))
    assert value(metrics, "request_params_n_sum") == 4
    assert value(metrics, "request_max_num_generation_tokens_sum") == 6 + 4
    assert value(metrics, "request_prompt_tokens_sum") == value(metrics, "prompt_tokens_total") == 4 * 3


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (asyncio.CancelledError(), "abort"),
        (ConnectionResetError(), "abort"),
        (Failure(504, "too late"), "abort"),
        (EngineError("broken"), "error"),
        (CapacityError("no room"), "error"),
        (ValueError("a mistake of the server's"), "error"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("told", [True, False])
def test_aborted_requests_are_counted_by_cause(
    metrics: ModelMetrics, error: BaseException, why: str, told: bool
) -> None:
    """Reporting an error in mid-stream may fail too, which does not change the reason."""
    with contextlib.suppress(type(error), ConnectionResetError), metrics.request(ask(2, n=2), 0.0) as watch:
        watch.said(end(2, 9.0, RequestStats(3, 5)))
        if told:
            watch.fail(error)
        raise ConnectionResetError if told else error
    assert ends(metrics) == {"stop": 1, why: 3}
    assert all(value(metrics, f"{name}_count") == 1 for name in PER_CHOICE)


def grown(after: dict[str, float], before: dict[str, float], name: str) -> float:
    return total(after, f"vllm:{name}") - total(before, f"vllm:{name}")


def ended(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Return the number of choices ended between two scrapes, by reason."""
    name = 'request_success_total{{engine="0",finished_reason="{}",model_name="tiny"}}'
    keys = {why: f"vllm:{name.format(why)}" for why in REASONS}
    return {why: count for why, key in keys.items() if (count := after[key] - before[key])}


@pytest.mark.parametrize("stream", [True, False])
def test_choices_that_are_served_are_timed_in_every_part(live: Live, stream: bool) -> None:
    before = live.metrics()
    body = LONG | {"prompt": ["a", "bc"], "max_tokens": 6, "n": 2, "stream": stream}
    assert live.ask("/v1/completions", body).status == 200
    after = live.metrics()
    assert ended(after, before) == {"length": 4}
    assert all(grown(after, before, f"{name}_count") == 4 for name in PER_CHOICE)
    assert all(grown(after, before, f"{name}_count") == 2 for name in PER_PROMPT)
    whole, queued, read, wrote, ran = (grown(after, before, f"{name}_sum") for name in PER_CHOICE[:5])
    assert min(queued, read, wrote) > 0 and ran == pytest.approx(read + wrote)
    assert queued + ran <= whole


@pytest.mark.parametrize("stream", [True, False])
def test_choices_whose_client_hangs_up_are_aborted(live: Live, stream: bool) -> None:
    before = live.metrics()
    sock = open_stream(live, ENDLESS | {"stream": stream})
    wait_for(lambda: running(live) == ROWS)
    sock.close()
    wait_for(lambda: running(live) == 0)
    after = live.metrics()
    assert ended(after, before) == {"abort": ROWS}
    assert grown(after, before, "e2e_request_latency_seconds_count") == 0


def test_choices_that_time_out_in_mid_stream_are_aborted() -> None:
    with Live(*PLAIN, "--request-timeout", "1") as live:
        before = live.metrics()
        assert live.ask("/v1/completions", ENDLESS).failure["code"] == "timeout"
        after = live.metrics()
    assert grown(after, before, "time_to_first_token_seconds_count") == ROWS
    assert ended(after, before) == {"abort": ROWS}


@pytest.mark.parametrize("stream", [True, False])
def test_choices_that_a_failed_step_ended_are_errors(live: Live, fault: Path, stream: bool) -> None:
    before = live.metrics()

    def is_under_way() -> bool:
        firsts = grown(live.metrics(), before, "time_to_first_token_seconds_count")
        return running(live) == ROWS and (firsts == ROWS or not stream)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.ask, "/v1/completions", ENDLESS | {"stream": stream})
        wait_for(is_under_way)
        fault.write_text("chosen")
        assert asked.result().failure["code"] == "engine_error"
    after = live.metrics()
    assert ended(after, before) == {"error": ROWS}
    assert grown(after, before, "e2e_request_latency_seconds_count") == 0


def test_resolved_settings_are_reported(live: Live) -> None:
    settled = open_model(SHIPPED["tiny"], EngineConfig(**ENGINE)).settings
    info = live.ask("/server_info").json
    named = settled.named()
    shown = named.keys() - {"device", "dtype", "bounds", "layout", "drafters"}
    assert {name: info[name] for name in shown} == {name: named[name] for name in shown}
    assert named.keys() >= {"max_running", "chunk_tokens", "prefix_policy", "max_model_len", "graphs"}
    assert (info["max_running"], info["memory_bytes"], info["slots"]) == (7, 64 << 20, "record")
    assert (info["device"], info["dtype"], info["drafters"]) == ("cpu", "float32", ["suffix"])
    assert info.items() >= asdict(settled.bounds).items()
    assert info["layout"] == asdict(settled.layout.describe())


def test_acceptance_is_reported_by_context_length(live: Live) -> None:
    assert live.ask("/v1/completions", LONG | {"max_tokens": 9, "stream": False}).status == 200
    info, found = live.ask("/server_info").json, live.metrics()
    assert set(info["acceptance_by_context"]) >= {"1024"}
    for name in ("steps", "tokens", "drafted", "accepted"):
        shown = {bound: own[name] for bound, own in info["acceptance_by_context"].items()}
        assert sum(shown.values()) == info[name]
        for bound, count in shown.items():
            own = [
                value
                for key, value in found.items()
                if key.startswith(f"specdec:context_{name}_total{{") and f'context="{bound}"' in key
            ]
            assert own == [count]
    for own in info["acceptance_by_context"].values():
        assert own["acceptance_length"] == pytest.approx(own["tokens"] / own["steps"])


def test_dashboards_for_vllm_find_their_metrics(live: Live) -> None:
    assert live.ask("/v1/completions", LONG | {"max_tokens": 3, "stream": False}).status == 200
    found = live.metrics()
    labelled = 'model_name="tiny"'
    for name in ASKED:
        own = [key for key in found if key.startswith(f"vllm:{name}{{")]
        assert own and all(labelled in key and 'engine="0"' in key for key in own), name
    short_of = [key for key in found if key.startswith("specdec:limited_total{")]
    assert len(short_of) == len(RESOURCES)  # including resources that have not been short
    assert total(found, "vllm:gpu_cache_usage_perc") == total(found, "vllm:kv_cache_usage_perc")
    for end in ("bucket", "sum", "count"):
        older, newer = (
            total(found, f"vllm:{name}_{end}")
            for name in ("time_per_output_token_seconds", "inter_token_latency_seconds")
        )
        assert older == newer
    for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "start_time_seconds"):
        assert found[f"process_{name}"] > 0
    assert len({*found}) == len(live.ask("/metrics").data.decode().splitlines()) - sum(
        line.startswith("#") for line in live.ask("/metrics").data.decode().splitlines()
    ), "no series stands twice"


@EXHAUSTIVE
@pytest.mark.parametrize("options", [(), ("--graphs",), ("--graphs", "--draft", "mtp")])
def test_every_prefilled_and_decoded_token_is_counted_in_a_step(options: tuple[str, ...]) -> None:
    """A choice's last token is not computed again."""
    with Live("--no-prefix-cache", *(options or PLAIN)) as live:
        before = live.metrics()
        answer = live.ask("/v1/completions", LONG | {"max_tokens": 40, "n": 2, "stream": False}).json
        after = live.metrics()
    usage = answer["usage"]
    kept = 2 * usage["prompt_tokens"] + usage["completion_tokens"] - 2
    assert grown(after, before, "iteration_tokens_total_sum") >= kept
    assert grown(after, before, "iteration_tokens_total_sum") <= kept + 2 * 8, "some of the last step's"
    steps = grown(after, before, "iteration_tokens_total_count")
    last = [v for k, v in after.items() if k.startswith("vllm:iteration_tokens_total_bucket") and "+Inf" in k]
    assert 0 < steps <= kept and last == [total(after, "vllm:iteration_tokens_total_count")]


def test_tokens_of_prompts_are_computed_or_cached(live: Live) -> None:
    before = live.metrics()
    body = LONG | {"prompt": "import os, sys\n" * 20, "max_tokens": 2, "stream": False}
    cached = 0
    for _ in range(2):
        cached += live.ask("/v1/completions", body).json["usage"]["prompt_tokens_details"]["cached_tokens"]
    after = live.metrics()
    assert grown(after, before, "prompt_tokens_cached_total") == cached > 0
    read, whole = (
        grown(after, before, f"{name}_sum")
        for name in ("request_prefill_kv_computed_tokens", "request_prompt_tokens")
    )
    assert read + cached == whole


def test_answers_are_counted_by_address_and_class(live: Live) -> None:
    def count(handler: str, status: str) -> float:
        key = f'http_requests_total{{handler="{handler}",method="GET",status="{status}"}}'
        return live.metrics().get(key, 0)

    before = count("/v1/models/{name}", "2xx"), count("/v1/models/{name}", "4xx")
    for path in ("/v1/models/tiny", "/v1/models/none", "/v1/models/other", "/nothing/at/all"):
        live.ask(path)
    assert (count("/v1/models/{name}", "2xx"), count("/v1/models/{name}", "4xx")) == (
        before[0] + 1,
        before[1] + 2,
    )
    assert not any("nothing" in key for key in live.metrics())
