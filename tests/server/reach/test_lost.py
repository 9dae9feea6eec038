"""Servers that are killed or restart, orderly stops, and keys between servers."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.selection import EXHAUSTIVE
from tests.server.live import Answer, Live
from tests.server.reach.pairs import (
    EXACT,
    SECRET,
    TEXT,
    completion,
    fetched,
    free_port,
    has_nixl,
    relay,
    settles,
    texts,
)
from tests.server.reach.proxies import PROXIES

pytestmark = [has_nixl, EXHAUSTIVE]

KEY = {"Authorization": "Bearer given"}


class Servers(ExitStack):
    """A prefill instance, a decode instance that falls back to prefill, and one that fails instead."""

    def __init__(self) -> None:
        super().__init__()
        self.port, self.other_port = free_port(), free_port()
        self.reads = self.start_reading()
        peers = [f"127.0.0.1:{port}" for port in (self.port, self.other_port)]
        every = [option for peer in peers for option in ("--reach-peers", peer)]
        self.writes = self.start("--role", "decode", "--reach-port", "0", *every)
        strict = ("--reach-on-failure", "fail", "--api-key", "given", "--api-key", "another")
        self.strict = self.start("--reach-port", str(self.other_port), *every, *strict)

    def start(self, *options: str) -> Live:
        return self.enter_context(Live(*EXACT, *options, "--drain-seconds", "1", env=SECRET))

    def start_reading(self) -> Live:
        return self.start("--role", "prefill", "--reach-port", str(self.port))


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers() as own:
        yield own


def params_of(live: Live, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = live.ask(path, PROXIES[0].to_prefill(body), **headers)
    assert answer.status == 200, answer.data
    told: dict[str, Any] = answer.json["kv_transfer_params"]
    return told


def prompt(name: str, **own: Any) -> tuple[str, dict[str, Any]]:
    return completion(f"# {name}\n{TEXT}", temperature=0, **own)


def lost(answer: Answer) -> bool:
    return answer.status == 503 and answer.error["code"] == "prefill_lost"


def test_one_that_does_both_lends_too(servers: Servers) -> None:
    path, body = prompt("both")
    params, before = params_of(servers.strict, path, body, **KEY), fetched(servers.writes)
    assert params["remote_port"] == servers.other_port
    found = texts(servers.writes.ask(path, body | {"kv_transfer_params": params}))
    assert fetched(servers.writes) == before + 1
    assert found == texts(servers.strict.ask(path, body, **KEY))
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.port, "bootstrap_room": 1}
    refused = servers.strict.ask(path, body | room, **KEY)
    assert refused.status == 400 and "has both roles" in refused.error["message"]


def test_keys_hold_and_callers_stay_apart(servers: Servers) -> None:
    path, body = prompt("keys")
    params = params_of(servers.reads, path, body)
    sent = body | {"kv_transfer_params": params}
    assert servers.strict.ask(path, sent).status == 401
    mine = servers.strict.ask(path, sent, **KEY).json["usage"]
    assert mine["prompt_tokens_details"]["cached_tokens"] == mine["prompt_tokens"] - 1
    other = servers.strict.ask(path, body, Authorization="Bearer another").json["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0, "what was fetched is its caller's alone"
    again = servers.strict.ask(path, body, **KEY).json["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_server_may_fail_where_a_prompt_cannot_be_fetched(servers: Servers) -> None:
    path, body = prompt("strict")
    params = params_of(servers.reads, path, body)
    other = body | {"prompt": f"# another\n{TEXT}", "kv_transfer_params": params}
    assert lost(servers.strict.ask(path, other, **KEY)), "it was signed for another prompt"
    assert texts(servers.strict.ask(path, body | {"kv_transfer_params": params}, **KEY))
    assert lost(servers.strict.ask(path, body | {"kv_transfer_params": {"do_remote_prefill": True}}, **KEY))
    for own in ({"prompt": "x"}, {"prompt": "def f(x):"}, {"prompt_logprobs": 0}):
        path, body = prompt("strict") if "prompt" not in own else completion("", temperature=0)
        body |= own
        params = params_of(servers.reads, path, body)
        answer = servers.strict.ask(path, body | {"kv_transfer_params": params}, **KEY)
        assert answer.status == 200, "nothing of it is to be fetched"


def test_a_lending_server_prefills_what_it_cannot_fetch(servers: Servers) -> None:
    path, body = prompt("lends")
    params = {"do_remote_prefill": True, "do_remote_decode": True}
    told = servers.strict.ask(path, body | {"kv_transfer_params": params}, **KEY)
    assert told.status == 200 and told.json["kv_transfer_params"]["specdec"]["leases"][0]
    before = fetched(servers.writes)
    sent = body | {"kv_transfer_params": told.json["kv_transfer_params"]}
    assert texts(servers.writes.ask(path, sent)) == texts(servers.strict.ask(path, body, **KEY))
    assert fetched(servers.writes) == before + 1


def test_a_server_that_is_killed_costs_no_text(servers: Servers) -> None:
    """It held two prompts; its successor at the same address holds neither."""
    asked = [prompt(f"killed {index}") for index in range(4)]
    params = [params_of(servers.reads, *own) for own in asked]
    path, body = asked[0]
    assert texts(servers.writes.ask(path, body | {"kv_transfer_params": params[0]}))
    servers.reads.process.send_signal(signal.SIGKILL)
    servers.reads.process.wait()
    before = fetched(servers.writes)
    path, body = asked[1]
    found = texts(servers.writes.ask(path, body | {"kv_transfer_params": params[1]}))
    assert found == texts(servers.strict.ask(path, body, **KEY))
    assert lost(servers.strict.ask(path, body | {"kv_transfer_params": params[1]}, **KEY))
    servers.reads = servers.start_reading()
    path, body = asked[2]
    found = texts(servers.writes.ask(path, body | {"kv_transfer_params": params[2]}))
    assert found == texts(servers.strict.ask(path, body, **KEY)) and fetched(servers.writes) == before
    path, body = prompt("alive again")
    for _ in range(100):
        body["prompt"] += "#"
        texts(relay(PROXIES[0], servers.reads, servers.writes, path, body))
        if fetched(servers.writes) > before:
            break
    assert fetched(servers.writes) > before, "it is met anew"
    assert settles(servers.writes, "specdec:reach_holds")


def test_a_server_that_stops_ends_in_order(servers: Servers) -> None:
    """Its leases are released, and its memory is intact."""
    path, body = prompt("stopped")
    params_of(servers.reads, path, body)
    code, log = servers.reads.stop()
    assert code == 0 and "Traceback" not in log and " ERROR " not in log
    for live in (servers.writes, servers.strict):
        code, log = live.stop()
        assert code == 0 and "Traceback" not in log and " ERROR " not in log
