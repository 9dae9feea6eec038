"""A prefill and a decode instance on this machine, with the requests that routers send."""

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import Live, total
from tests.server.reach.pairs import (
    DRAWN,
    EXACT,
    KINDS,
    ROOMS,
    SECRET,
    TEXT,
    begin,
    comes,
    completion,
    connect,
    fetched,
    has_nixl,
    relay,
    settles,
    texts,
    together,
)
from tests.server.reach.proxies import PROXIES, Proxy, sglang
from tests.tolerances import FLOAT64_LOGITS

pytestmark = has_nixl


@pytest.fixture(scope="module")
def alone() -> Iterator[Live]:
    with Live(*EXACT) as live:
        yield live


@pytest.fixture(scope="module")
def reads() -> Iterator[Live]:
    own = ("--role", "prefill", "--reach-port", "0", "--drain-seconds", "1")
    with Live(*EXACT, *own, env=SECRET) as live:
        yield live


@pytest.fixture(scope="module")
def port(reads: Live) -> int:
    return int(reads.ask("/server_info").json["disaggregation_bootstrap_port"])


@pytest.fixture(scope="module")
def writes(port: int) -> Iterator[Live]:
    peers = ("--reach-port", "0", "--reach-peers", f"127.0.0.1:{port}")
    with Live(*EXACT, "--role", "decode", *peers, env=SECRET) as live:
        yield live


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("proxy", PROXIES, ids=lambda own: own.name)
def test_two_servers_give_the_text_of_one(
    alone: Live, reads: Live, writes: Live, kind: Any, proxy: Proxy
) -> None:
    """Of four kinds of request, each router and API gets two."""
    ways = ({"temperature": 0}, DRAWN, {**DRAWN, "n": 2}, {**DRAWN, "stream": True})
    for index, own in enumerate(ways[(PROXIES.index(proxy) + KINDS.index(kind)) % 2 :: 2]):
        path, body = kind(f"# {proxy.name} {kind.__name__} {index}\n{TEXT}", **own)
        before = fetched(writes)
        answer = relay(proxy, reads, writes, path, body)
        assert texts(answer) == texts(alone.ask(path, body))
        assert fetched(writes) == before + 1
        if not own.get("stream"):
            usage = answer.json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert settles(reads, "specdec:reach_leases")


@pytest.mark.parametrize("kind", KINDS)
def test_servers_queried_at_once_give_the_text_of_one(
    alone: Live, reads: Live, writes: Live, port: int, kind: Any
) -> None:
    for index, own in enumerate(({"temperature": 0}, {**DRAWN, "n": 2}, {**DRAWN, "stream": True})):
        path, body = kind(f"# at once {kind.__name__} {index}\n{TEXT}", **own)
        before = fetched(writes)
        first, answer = connect(reads, writes, port, path, body)
        assert not any(texts(first))
        assert texts(answer) == texts(alone.ask(path, body))
        assert fetched(writes) == before + 1
    assert settles(reads, "specdec:reach_leases")


def test_each_of_several_prompts_is_fetched(alone: Live, reads: Live, writes: Live, port: int) -> None:
    prompts = [f"# prompt {index}\n{TEXT}" for index in range(3)]
    path, body = completion("", **DRAWN)
    body |= {"prompt": [*prompts, "x"], "n": 2}
    expected, before = texts(alone.ask(path, body)), fetched(writes)
    assert texts(relay(PROXIES[0], reads, writes, path, body)) == expected
    assert fetched(writes) == before + 3
    body["prompt"] = [f"# again\n{prompt}" for prompt in prompts]
    expected, before = texts(alone.ask(path, body)), fetched(writes)
    rooms = [next(ROOMS) for _ in prompts]
    sent = body | {"bootstrap_host": ["127.0.0.1"] * 3, "bootstrap_port": [port] * 3, "bootstrap_room": rooms}
    _, answer = together(reads, writes, path, sent)
    assert texts(answer) == expected and fetched(writes) == before + 3


def near(found: Any, expected: Any) -> bool:
    """Compare JSON: floats within the rounding of float64 logits, everything else exactly.

    Draft widths depend on measured times, and a window's width changes rounding in the last bits.
    """
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(near(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(near, found, expected))
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=0.0, abs_tol=FLOAT64_LOGITS)
    return bool(found == expected)


def test_scored_prompts_are_prefilled_by_the_decode_instance(alone: Live, reads: Live, writes: Live) -> None:
    for own in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
        path, body = completion(f"# scored {own}\n{TEXT}", temperature=0, **own)
        before = fetched(writes)
        found = relay(PROXIES[0], reads, writes, path, body).json["choices"]
        assert near(found, alone.ask(path, body).json["choices"])
        assert fetched(writes) == before
        assert settles(reads, "specdec:reach_leases"), "it is told that nobody comes"


def forged(params: dict[str, Any], case: str) -> dict[str, Any]:
    lease = params["specdec"]["leases"][0]
    match case:
        case "mac":
            return params | {"specdec": params["specdec"] | {"leases": [lease | {"mac": "0" * 64}]}}
        case "engine":
            return params | {"remote_engine_id": "0" * 32}
        case "lease":
            return params | {"specdec": params["specdec"] | {"leases": [lease | {"lease": "0" * 32}]}}
        case "host":
            return params | {"remote_host": "203.0.113.1"}
        case "port":
            return params | {"remote_port": 1}
        case "none":
            return {"do_remote_prefill": True}
        case _:
            return params | {"specdec": params["specdec"] | {"leases": []}}


@pytest.mark.parametrize("case", ["mac", "engine", "lease", "host", "port", "none", "leases"])
def test_prompts_with_another_signature_are_prefilled_here(
    alone: Live, reads: Live, writes: Live, case: str
) -> None:
    path, body = completion(f"# forged {case}\n{TEXT}", temperature=0)
    params = reads.ask(path, PROXIES[0].to_prefill(body)).json["kv_transfer_params"]
    before = fetched(writes)
    answer = writes.ask(path, body | {"kv_transfer_params": forged(params, case)})
    assert texts(answer) == texts(alone.ask(path, body)) and fetched(writes) == before


@pytest.mark.parametrize("change", [{"prompt": f"# another\n{TEXT}"}, {"cache_salt": "another"}])
def test_leases_are_for_one_prompt_and_salt(
    alone: Live, reads: Live, writes: Live, change: dict[str, Any]
) -> None:
    path, body = completion(f"# changed {list(change)}\n{TEXT}", temperature=0, cache_salt="one")
    params = reads.ask(path, PROXIES[0].to_prefill(body)).json["kv_transfer_params"]
    before, other = fetched(writes), body | change
    answer = writes.ask(path, other | {"kv_transfer_params": params})
    assert texts(answer) == texts(alone.ask(path, other)) and fetched(writes) == before
    assert writes.ask(path, body | {"kv_transfer_params": params}).status == 200
    assert fetched(writes) == before + 1, "the control: what was signed can be fetched"


def test_a_room_serves_one_request(reads: Live, writes: Live, port: int) -> None:
    path, body = completion(f"# a room\n{TEXT}", temperature=0)
    sent = sglang(body, "127.0.0.1", port, next(ROOMS))
    assert [own.status for own in together(reads, writes, path, sent)] == [200, 200]
    again = reads.ask(path, sent)
    assert again.status == 409 and again.error["param"] == "bootstrap_room"


def test_a_failed_room_is_prefilled_locally_at_once(
    alone: Live, reads: Live, writes: Live, port: int
) -> None:
    """The prefill instance refuses the request, before the other asks for it or while it waits."""
    path, body = completion(f"# failed\n{TEXT}", temperature=0)
    room = next(ROOMS)
    refused = reads.ask(path, sglang(body | {"prompt": [70_000_000]}, "127.0.0.1", port, room))
    assert refused.status == 400
    answer = writes.ask(path, sglang(body, "127.0.0.1", port, room))
    assert texts(answer) == texts(alone.ask(path, body))
    assert fetched(writes, "prefill_failed"), "it has not waited for a room that never comes"


def test_disconnects_release_held_prompts(reads: Live, writes: Live, port: int) -> None:
    path, body = completion(f"# left\n{TEXT}", temperature=0)
    sock = begin(writes, path, sglang(body, "127.0.0.1", port, next(ROOMS)))
    comes(writes, "specdec:reach_holds")
    sock.close()
    assert settles(writes, "specdec:reach_holds") and settles(writes, "vllm:num_requests_running")
    for index in range(6):
        path, body = completion(f"# left {index}\n{TEXT * 6}", temperature=0)
        sock = begin(reads, path, sglang(body, "127.0.0.1", port, next(ROOMS)))
        time.sleep(0.01 * index)
        sock.close()
    assert settles(reads, "vllm:num_requests_running")


def test_a_server_reports_its_role(alone: Live, reads: Live, writes: Live) -> None:
    for live, role, mode in (
        (alone, None, "null"),
        (reads, "prefill", "prefill"),
        (writes, "decode", "decode"),
    ):
        told = live.ask("/server_info").json
        assert (told["role"], told["disaggregation_mode"]) == (role, mode)
        assert told["served_model_name"] == "tiny"
        assert live.ask("/model_info").json["model_path"] == "tiny"


def test_requests_without_transfer_fields_are_answered_normally(
    alone: Live, reads: Live, writes: Live
) -> None:
    path, body = completion("def f(x):\n", temperature=0)
    expected = texts(alone.ask(path, body))
    assert texts(reads.ask(path, body)) == texts(writes.ask(path, body)) == expected


def test_requests_outside_the_role_are_refused(alone: Live, reads: Live, writes: Live) -> None:
    path, body = completion("x")
    for live, params in (
        (alone, {"do_remote_decode": True}),
        (reads, {"do_remote_prefill": True}),
        (writes, {"do_remote_decode": True}),
    ):
        answer = live.ask(path, body | {"kv_transfer_params": params})
        assert answer.status == 400 and answer.error["param"] == "kv_transfer_params"
    answer = reads.ask(path, body | {"keep_alive": 5})
    assert answer.status == 400 and answer.error["param"] == "keep_alive"


def test_nothing_failed_and_memory_is_whole(reads: Live, writes: Live) -> None:
    """Runs last: leases are released, and both arenas are intact."""
    for live in (reads, writes):
        figures = live.metrics()
        assert not total(figures, "specdec:failed_steps_total")
        assert total(figures, "vllm:prompt_tokens_total")
        assert not total(figures, "specdec:reach_quarantined")
        assert total(figures, "specdec:clean_checks_total")
