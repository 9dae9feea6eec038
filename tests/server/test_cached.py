"""Prompts that begin like earlier ones: what was not read again is told, and nothing else is different."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import Live, serving, total

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
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
def test_a_mark_saves_the_second_request_what_else_only_the_third_is_saved(live: Live, where: str) -> None:
    live.ask("/flush_cache", method="POST")
    system: object = [{"type": "text", "text": SYSTEM, **MARK}] if where == "part" else SYSTEM
    own = MARK if where == "message" else {}
    counts = [cached(live, CHAT, chat(word, system, **own)) for word in ("one", "two", "three")]
    assert counts[0] == 0 and counts[2] > 30
    assert (counts[1] > 30) == (where != "nowhere")


def test_too_many_marks_are_refused(live: Live) -> None:
    parts = [{"type": "text", "text": "a", **MARK}] * 5
    answer = live.ask(CHAT, chat("one", parts))
    assert (answer.status, answer.error["param"]) == (400, "cache_control")


def test_salts_and_flushing_keep_prompts_apart(live: Live) -> None:
    live.ask("/flush_cache", method="POST")
    prompt = "import os\n" * 20
    asked = [("", "a"), ("def", "a"), ("class", "a"), ("def", "b"), ("def", None)]
    counts = [cached(live, COMPLETE, {"prompt": prompt + end, "cache_salt": salt}) for end, salt in asked]
    assert counts[2] and counts == [0, 0, counts[2], 0, 0]
    live.ask("/flush_cache", method="POST")
    assert cached(live, COMPLETE, {"prompt": prompt + "class", "cache_salt": "a"}) == 0


def test_choices_of_one_prompt_are_charged_once(live: Live) -> None:
    body = {"prompt": "y = 2\n" * 30, "max_tokens": 2, "n": 6, "temperature": 1.0}
    usage = live.ask(COMPLETE, body).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def test_marks_are_counted_before_anything_is_read(live: Live) -> None:
    parts = [{"type": "text", "text": "", **MARK}] * 20_000
    answer = live.ask(CHAT, chat("one", parts))
    assert (answer.status, answer.error["param"]) == (400, "cache_control")


def test_the_figures_say_what_was_saved(live: Live) -> None:
    before = live.metrics()
    text = "x = 1\n" * 30
    saved = [cached(live, COMPLETE, {"prompt": text + end}) for end in ("", "y", "z")]
    now = live.metrics()

    def rise(name: str) -> float:
        return total(now, name) - total(before, name)

    assert rise("vllm:prefix_cache_hits_total") == sum(saved) > 0
    assert rise("vllm:prefix_cache_queries_total") == rise("vllm:prompt_tokens_total")
    assert total(now, "specdec:prefix_bytes") > 0 and total(now, "vllm:kv_cache_usage_perc") == 0
