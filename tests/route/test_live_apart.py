"""Real servers of both roles behind a router respond like one server, in either protocol."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.route.live_router import LiveRouter
from tests.selection import EXHAUSTIVE
from tests.server.live import Live, total
from tests.server.reach.pairs import DRAWN, EXACT, KINDS, SECRET, TEXT, fetched, has_nixl, settles, texts

pytestmark = [has_nixl, EXHAUSTIVE]


@pytest.fixture(scope="module")
def alone() -> Iterator[Live]:
    with Live(*EXACT) as live:
        yield live


@pytest.fixture(scope="module")
def reads() -> Iterator[Live]:
    with Live(*EXACT, "--role", "prefill", "--reach-port", "0", "--drain-seconds", "1", env=SECRET) as live:
        yield live


@pytest.fixture(scope="module")
def port(reads: Live) -> int:
    return int(reads.ask("/server_info").json["disaggregation_bootstrap_port"])


@pytest.fixture(scope="module")
def writes(port: int) -> Iterator[Live]:
    peers = ("--reach-port", "0", "--reach-peers", f"127.0.0.1:{port}")
    with Live(*EXACT, "--role", "decode", *peers, env=SECRET) as live:
        yield live


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def router(request: pytest.FixtureRequest, reads: Live, writes: Live, port: int) -> Iterator[LiveRouter]:
    options = (
        "--prefill",
        f"{reads.url}?bootstrap={port}",
        "--decode",
        writes.url,
        "--prefill-min-bytes",
        "64",
    )
    with LiveRouter(*options, "--pd-protocol", request.param) as live:
        live.wait(2)
        yield live


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [{"temperature": 0, "stream": True}, {**DRAWN, "n": 2}], ids=["stream", "n"])
def test_both_say_what_one_says(
    alone: Live, reads: Live, writes: Live, router: LiveRouter, kind: Any, own: dict[str, Any]
) -> None:
    path, body = kind(f"# {router.url} {kind.__name__} {own}\n{TEXT}", **own)
    before = fetched(writes)
    assert texts(router.ask(path, body)) == texts(alone.ask(path, body))
    assert fetched(writes) == before + 1
    assert settles(reads, "specdec:reach_leases")


def test_several_prompts_of_one_request(alone: Live, writes: Live, router: LiveRouter) -> None:
    prompts = [f"# {router.url} {i}\n{TEXT}" for i in range(2)]
    body = {"prompt": prompts, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    before = fetched(writes)
    assert texts(router.ask("/v1/completions", body)) == texts(alone.ask("/v1/completions", body))
    assert fetched(writes) == before + 2


def test_the_official_client_and_its_hang_up(reads: Live, writes: Live, router: LiveRouter) -> None:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0) as client:
        long = {"model": "tiny", "prompt": f"# {router.url} long\n{TEXT}", "max_tokens": 2000, "stream": True}
        stream = client.completions.create(**long, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
        next(iter(stream))
        assert total(writes.metrics(), "vllm:num_requests_running") == 1
        stream.close()
    assert settles(writes, "vllm:num_requests_running") and settles(reads, "specdec:reach_leases")
    assert settles(router, "specdec:route_replica_under_way")


def test_the_writer_reads_once_the_reader_is_gone(alone: Live, reads: Live, writes: Live, port: int) -> None:
    """Must be the last test, because it kills the prefill instance."""
    options = (
        "--prefill",
        f"{reads.url}?bootstrap={port}",
        "--decode",
        writes.url,
        "--prefill-min-bytes",
        "64",
    )
    body = {"prompt": f"# gone\n{TEXT}", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with LiveRouter(*options, "--check-period", "1000") as router:
        router.wait(2)
        reads.process.kill()
        reads.process.wait()
        assert texts(router.ask("/v1/completions", body)) == texts(alone.ask("/v1/completions", body))
        assert router.metrics()['specdec:route_prefills_total{reader="decode"}'] == 1
