"""Prompts with cached prefixes: cached tokens are reported, and nothing else changes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Live, serving, total

SERVING = Path(__file__).parents[2] / "docs" / "serving.md"
CHAT, COMPLETE, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
SYSTEM = "You write Python. " * 12
MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    yield from serving("--prefix-cache", "--max-running", "16", "--dtype", "float32")


def cached(live: Live, path: str, body: dict[str, Any]) -> int:
    usage = live.ask(path, {"max_tokens": 2, "temperature": 0, **body}).json["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= found < usage["prompt_tokens"]
    return found


def chat(word: str, system: object = SYSTEM, **message: object) -> dict[str, Any]:
    first = {"role": "system", "content": system, **message}
    return {"messages": [first, {"role": "user", "content": f"{word}: write a function."}]}


@pytest.mark.parametrize("where", ["part", "message", "nowhere"])
def test_a_mark_makes_the_second_request_hit_a_short_prefix(live: Live, where: str) -> None:
    live.ask("/flush_cache", method="POST")
    system: object = [{"type": "text", "text": SYSTEM, **MARK}] if where == "part" else SYSTEM
    own = MARK if where == "message" else {}
    counts = [cached(live, CHAT, chat(word, system, **own)) for word in ("one", "two", "three")]
    assert counts[0] == 0 and counts[2] > 30
    assert (counts[1] > 30) == (where != "nowhere")


@pytest.mark.parametrize("own", [{}, {"ttl": "5m"}, {"ttl": "1h"}, {"ttl": None}], ids=str)
def test_a_mark_may_have_a_ttl(live: Live, own: dict[str, Any]) -> None:
    live.ask("/flush_cache", method="POST")
    mark = {"cache_control": {"type": "ephemeral", **own}}
    assert [cached(live, CHAT, chat(word, **mark)) > 30 for word in ("one", "two")] == [False, True]


def test_null_is_no_mark(live: Live) -> None:
    live.ask("/flush_cache", method="POST")
    none = {"cache_control": None}
    chats = (chat("one", **none), chat("two", [{"type": "text", "text": SYSTEM, **none}]))
    assert [cached(live, CHAT, own) for own in chats] == [0, 0]


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
@pytest.mark.parametrize(
    "mark",
    [
        *({}, [], "", 0, False, True, "ephemeral", ["ephemeral"], {"type": "persistent"}, {"ttl": "5m"}),
        *({"type": "ephemeral", "ttl": own} for own in ("2h", 300, {})),
        {"type": "ephemeral", "scope": "global"},
    ],
    ids=str,
)
def test_invalid_marks_are_refused_by_position(live: Live, mark: object, path: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": mark}]
    says = ': give {"type": "ephemeral"}, or leave it out.'
    for body, place in (
        (chat("one", cache_control=mark), "messages.0.cache_control"),
        (chat("one", parts), "messages.0.content.1.cache_control"),
    ):
        answer = live.ask(path, {"max_tokens": 1, **body})
        assert (answer.status, answer.error["message"]) == (400, place + says)
        assert answer.error["param"] == "messages"


@pytest.mark.parametrize("field", [MARK, {"cache_marks": [5]}], ids=str)
def test_a_misplaced_mark_gets_a_hint(live: Live, field: dict[str, Any]) -> None:
    for path, body in ((CHAT, chat("one")), (COMPLETE, {"prompt": "x"})):
        answer = live.ask(path, {"max_tokens": 1, **body, **field})
        assert (answer.status, answer.error["param"]) == (400, *field)
        assert '"cache_control": {"type": "ephemeral"} on a message of a chat' in answer.error["message"]


def test_marks_are_described(live: Live) -> None:
    schemas = live.ask("/openapi.json").json["components"]["schemas"]
    mark = {"$ref": "#/components/schemas/CacheBreakpoint"}
    assert all(
        mark in schemas[name]["properties"]["cache_control"]["anyOf"]
        for name in ("ChatMessage", "MessagePart")
    )
    assert {"$ref": "#/components/schemas/MessagePart"} in [
        kind.get("items") for kind in schemas["ChatMessage"]["properties"]["content"]["anyOf"][0]["oneOf"]
    ]
    assert schemas["CacheBreakpoint"]["properties"]["type"]["const"] == "ephemeral"


@pytest.mark.parametrize(
    ("salt", "says"),
    [(5, "cannot be 5"), ([], "cannot be []"), ("", "cannot be ''"), ("\ud800", "valid Unicode")],
)
def test_an_invalid_salt_is_explained(live: Live, salt: object, says: str) -> None:
    answer = live.ask(COMPLETE, {"prompt": "x", "cache_salt": salt})
    assert (answer.status, answer.error["param"]) == (400, "cache_salt")
    assert says in answer.error["message"] and "give a string of 1 to 256" in answer.error["message"]


@pytest.mark.parametrize("is_marked", [False, True])
def test_turns_hit_the_previous_prompt_even_if_the_template_rewrites_answers(
    live: Live, is_marked: bool
) -> None:
    """The template of tiny adds a role before answers that no prompt ends with."""
    live.ask("/flush_cache", method="POST")
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    read, found = [], []
    for turn in range(4):
        user = {"role": "user", "content": f"Turn {turn}: write a function."}
        own = {**user, **MARK} if is_marked else user
        body = {"messages": [*messages, own], "max_tokens": 8, "temperature": 0}
        answer = live.ask(CHAT, body).json
        read.append(answer["usage"]["prompt_tokens"])
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages += [user, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
    assert found == [0, *read[:-1]]


def test_too_many_marks_are_refused(live: Live) -> None:
    parts = [{"type": "text", "text": "a", **MARK}] * 5
    answer = live.ask(CHAT, chat("one", parts))
    assert (answer.status, answer.error["param"]) == (400, "cache_control")


def test_salts_and_flushing_keep_prompts_apart(live: Live) -> None:
    live.ask("/flush_cache", method="POST")
    prompt = "import os\n" * 20
    asked = [("", "a"), ("def", "a"), ("class", "a"), ("def", "b"), ("def", None)]
    counts = [cached(live, COMPLETE, {"prompt": prompt + end, "cache_salt": salt}) for end, salt in asked]
    assert counts[2] and counts == [0, counts[2], counts[2], 0, 0]
    live.ask("/flush_cache", method="POST")
    assert cached(live, COMPLETE, {"prompt": prompt + "class", "cache_salt": "a"}) == 0


def test_choices_of_one_prompt_are_charged_once(live: Live) -> None:
    body = {"prompt": "y = 2\n" * 30, "max_tokens": 2, "n": 6, "temperature": 1.0}
    usage = live.ask(COMPLETE, body).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def test_marks_are_counted_before_anything_is_read(live: Live) -> None:
    parts = [{"type": "text", "text": "", **MARK}] * 10_000
    answer = live.ask(CHAT, chat("one", parts))
    assert (answer.status, answer.error["param"]) == (400, "cache_control")


def test_metrics_report_cached_tokens(live: Live) -> None:
    before = live.metrics()
    text = "x = 1\n" * 30
    saved = [cached(live, COMPLETE, {"prompt": text + end}) for end in ("", "y", "z")]
    now = live.metrics()

    def rise(name: str) -> float:
        return total(now, name) - total(before, name)

    assert rise("vllm:prefix_cache_hits_total") == sum(saved) > 0
    assert rise("vllm:prefix_cache_queries_total") == rise("vllm:prompt_tokens_total")
    assert total(now, "specdec:prefix_bytes") > 0 and total(now, "vllm:kv_cache_usage_perc") == 0


def test_metrics_match_the_documentation(live: Live) -> None:
    named = {*re.findall(r"`((?:vllm|specdec):\w+)`", SERVING.read_text("utf-8"))}
    told = {*re.findall(r"# TYPE (\S+)", live.ask("/metrics").data.decode())}
    assert named <= told
    assert {name for name in told if "prefix" in name} <= named
