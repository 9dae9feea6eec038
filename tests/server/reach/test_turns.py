"""Two servers of role both, and a conversation as a router runs it: three requests per turn."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from tests.selection import EXHAUSTIVE
from tests.server.live import Live, total
from tests.server.reach.pairs import (
    DRAWN,
    EXACT,
    SECRET,
    TEXT,
    chat,
    fetched,
    free_port,
    has_nixl,
    settles,
    texts,
)

pytestmark = [has_nixl, EXHAUSTIVE]

CACHED = {"do_remote_decode": True, "specdec": {"v": 1, "cached_only": True}}
SAYS = 70
"""Tokens of each answer: more than the minimum worth fetching."""
COMPLETIONS = "/v1/completions"


class Trio(NamedTuple):
    alone: Live
    reads: Live
    writes: Live


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    with ExitStack() as stack:
        ports = free_port(), free_port()
        own = [
            ("--reach-port", str(here), "--reach-peers", f"127.0.0.1:{there}", "--drain-seconds", "1")
            for here, there in (ports, ports[::-1])
        ]
        alone = stack.enter_context(Live(*EXACT))
        yield Trio(alone, *(stack.enter_context(Live(*EXACT, *options, env=SECRET)) for options in own))


def asked(live: Live, path: str, body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Request a lease, and return the whole answer."""
    answer = live.ask(path, body | {"max_tokens": 1, "stream": False, "kv_transfer_params": params})
    assert answer.status == 200, answer.data
    assert not any(texts(answer))
    whole: dict[str, Any] = answer.json
    return whole


def turn(trio: Trio, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Send a router's three requests; return what was cached, what was prefilled, and the answer."""
    known = asked(trio.writes, path, body, CACHED)
    read = asked(trio.reads, path, body, known["kv_transfer_params"] | {"do_remote_decode": True})
    answer = trio.writes.ask(path, body | {"kv_transfer_params": read["kv_transfer_params"]})
    assert texts(answer) == texts(trio.alone.ask(path, body))
    return known, read, answer.json


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def completion(prompt: Sequence[int], **own: Any) -> dict[str, Any]:
    return {"prompt": list(prompt), "max_tokens": SAYS, "ignore_eos": True, "return_token_ids": True, **own}


def ids_of(live: Live, text: str) -> list[int]:
    ids: list[int] = live.ask("/tokenize", {"prompt": text}).json["tokens"]
    return ids


def test_a_conversation_goes_back_and_forth(trio: Trio) -> None:
    ids, before = ids_of(trio.alone, f"# turns\n{TEXT}"), 0
    for number in range(3):
        known, read, answer = turn(trio, COMPLETIONS, completion(ids, **DRAWN))
        params = known["kv_transfer_params"]
        assert known["usage"]["prompt_tokens"] == read["usage"]["prompt_tokens"] == len(ids)
        if number == 0:
            assert params["specdec"]["leases"] == [None] and not params["remote_num_tokens"]
        else:
            assert params["remote_num_tokens"] == cached(known) == before
        if number == 1:  # the very first fetch is always tried
            assert fetched(trio.reads) == 1
            assert total(trio.reads.metrics(), "specdec:reach_fetched_tokens_total") >= SAYS - 16
            assert cached(read) == before
        assert read["kv_transfer_params"]["remote_num_tokens"] == len(ids) - 1
        before = len(ids) + SAYS - 1  # the last token has no KV yet
        ids = [*ids, *answer["choices"][0]["token_ids"], *ids_of(trio.alone, f"\n# turn {number}\n{TEXT}")]
    assert fetched(trio.writes) >= 1, "which fetches from the other one too"
    assert settles(trio.reads, "specdec:reach_leases") and settles(trio.writes, "specdec:reach_leases")


def test_chats_go_back_and_forth(trio: Trio) -> None:
    path, body = chat(f"# chats\n{TEXT}", temperature=0, max_tokens=SAYS)
    for number in range(3):
        *_, answer = turn(trio, path, body)
        said = answer["choices"][0]["message"]["content"]
        body["messages"] += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"# chat {number}\n{TEXT}"},
        ]


def test_a_conversation_moves_to_another_server(trio: Trio) -> None:
    ids = ids_of(trio.alone, f"# moved\n{TEXT}")
    said = trio.writes.ask(COMPLETIONS, completion(ids, temperature=0)).json["choices"][0]["token_ids"]
    body = completion([*ids, *said, *ids[:9]], **DRAWN)
    params = asked(trio.writes, COMPLETIONS, body, CACHED)["kv_transfer_params"]
    answer = trio.reads.ask(COMPLETIONS, body | {"kv_transfer_params": params})
    assert texts(answer) == texts(trio.alone.ask(COMPLETIONS, body))
    assert settles(trio.writes, "specdec:reach_leases")


def changed(params: dict[str, Any], case: str) -> dict[str, Any]:
    lease = params["specdec"]["leases"][0]
    told = {
        "beyond": lease | {"tokens": 100_000},
        "fewer": lease | {"tokens": lease["tokens"] - 1},
        "all": {name: lease[name] for name in ("lease", "mac")},
        "mac": lease | {"mac": "0" * 64},
        "lease": lease | {"lease": "0" * 32},
    }
    return params | {"specdec": params["specdec"] | {"leases": [told[case]]}}


@pytest.mark.parametrize("case", ["beyond", "fewer", "all", "mac", "lease", "salt"])
def test_what_was_not_lent_so_is_read(trio: Trio, case: str) -> None:
    ids = ids_of(trio.alone, f"# changed {case}\n{TEXT}")
    said = trio.writes.ask(COMPLETIONS, completion(ids, temperature=0)).json["choices"][0]["token_ids"]
    body = completion([*ids, *said, *ids[:9]], temperature=0)
    params = asked(trio.writes, COMPLETIONS, body, CACHED)["kv_transfer_params"]
    assert params["remote_num_tokens"] == len(ids) + len(said) - 1
    if case == "salt":
        body["cache_salt"] = "another"
    else:
        params = changed(params, case)
    before, refused = fetched(trio.reads), fetched(trio.reads, "bad_mac")
    read = asked(trio.reads, COMPLETIONS, body, params | {"do_remote_decode": True})
    assert fetched(trio.reads) == before and fetched(trio.reads, "bad_mac") == refused + 1
    assert cached(read) < 16, "but for what many prompts begin with"
    answer = trio.writes.ask(COMPLETIONS, body | {"kv_transfer_params": read["kv_transfer_params"]})
    assert texts(answer) == texts(trio.alone.ask(COMPLETIONS, body))


def test_several_prompts_have_separate_lengths(trio: Trio) -> None:
    ids = ids_of(trio.alone, f"# several\n{TEXT}")
    prompts = [[*ids[5 * index :], *ids] for index in range(2)]
    said = trio.writes.ask(COMPLETIONS, completion([], temperature=0) | {"prompt": prompts}).json["choices"]
    longer = [[*prompt, *own["token_ids"], 7] for prompt, own in zip(prompts, said, strict=True)]
    body = completion([], temperature=0) | {"prompt": [longer[0], [7], longer[1], ids[::-1]]}
    known, read, _ = turn(trio, COMPLETIONS, body)
    leases = known["kv_transfer_params"]["specdec"]["leases"]
    assert [lease and lease["tokens"] for lease in leases] == [
        len(longer[0]) - 2,
        None,
        len(longer[1]) - 2,
        None,
    ]
    assert len(read["kv_transfer_params"]["specdec"]["leases"]) == 4


def test_nothing_failed_and_memory_is_whole(trio: Trio) -> None:
    """Runs last."""
    for live in (trio.reads, trio.writes):
        assert settles(live, "vllm:num_requests_running")
        figures = live.metrics()
        assert not total(figures, "specdec:failed_steps_total")
        assert not total(figures, "specdec:reach_quarantined")
        assert total(figures, "specdec:clean_checks_total")
