"""Echoed prompts with log-probabilities, minimum lengths, and structured output, over HTTP."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specdec import SamplingParams, SpecEngine
from tests.selection import EXHAUSTIVE
from tests.server.live import Live, serving, total

PROMPT = "import os\n\n\ndef "
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    yield from serving()


@EXHAUSTIVE
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_has_the_prompts_likelihoods(live: Live, as_ids: bool) -> None:
    with SpecEngine("tiny") as engine:
        assert engine.tokenizer
        ids = engine.tokenizer.encode(PROMPT)
        params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2, logprobs=2)
        wanted = engine.generate([ids], params)[0]
    assert wanted.prompt_logprobs and wanted.logprobs
    body = {
        "prompt": ids if as_ids else PROMPT,
        "max_tokens": 3,
        "temperature": 0,
        "echo": True,
        "logprobs": 2,
    }
    (choice,) = live.ask(COMPLETE, body).json["choices"]
    assert choice["text"] == PROMPT + wanted.text
    found = choice["logprobs"]
    assert [len(column) for column in found.values()] == [len(ids) + 3] * 4
    assert "".join(found["tokens"]) == choice["text"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    logprobs = [own.logprob for own in (*wanted.prompt_logprobs, *wanted.logprobs) if own]
    assert found["token_logprobs"][1:] == pytest.approx(logprobs, abs=1e-4)
    assert all(2 <= len(top) <= 3 for top in found["top_logprobs"][1:])


def test_an_echo_is_first_in_every_choice_and_once_in_a_stream(live: Live) -> None:
    body = {"prompt": ["a = ", "b = "], "n": 2, "max_tokens": 5, "seed": 1, "echo": True}
    whole = live.ask(COMPLETE, body).json["choices"]
    assert [choice["text"][:4] for choice in whole] == ["a = ", "a = ", "b = ", "b = "]
    texts = [""] * 4
    for event in live.ask(COMPLETE, body | {"stream": True}).events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_echo_may_be_all(live: Live, logprobs: int | None) -> None:
    """A client that only wants a prompt scored gets no token and is charged for none."""
    body = {"prompt": PROMPT, "echo": True, "temperature": 0, "logprobs": logprobs}
    whole = live.ask(COMPLETE, body | {"max_tokens": 0, "return_token_ids": True}).json
    (choice,) = whole["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (PROMPT, [], "length")
    usage = whole["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    (longer,) = live.ask(COMPLETE, body | {"max_tokens": 1}).json["choices"]
    for name, column in (choice["logprobs"] or {}).items():
        assert len(column) == usage["prompt_tokens"] and column == longer["logprobs"][name][:-1]
    assert (choice["logprobs"] is None) == (logprobs is None)
    asked = {"max_tokens": 0, "stream": True, "stream_options": {"include_usage": True}}
    *said, last = live.ask(COMPLETE, body | asked).events
    (streamed,) = (event["choices"][0] for event in said)
    assert streamed == {name: choice[name] for name in streamed}
    assert last["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("asked", [{"prompt": PROMPT}, {"messages": [{"role": "user", "content": PROMPT}]}])
@pytest.mark.parametrize("wanted", [0, 2])
def test_prompt_log_probabilities_are_part_of_each_choice(
    live: Live, asked: dict[str, Any], wanted: int
) -> None:
    """As in vLLM: null for the first token, and the alternatives for each other one."""
    path = CHAT if "messages" in asked else COMPLETE
    body = {**asked, "max_tokens": 2, "n": 2, "seed": 1, "prompt_logprobs": wanted, "return_token_ids": True}
    first, second = live.ask(path, body).json["choices"]
    found, ids = first["prompt_logprobs"], first["prompt_token_ids"]
    assert second["prompt_logprobs"] == found and len(found) == len(ids) and found[0] is None
    for token, place in zip(ids[1:], found[1:], strict=True):
        assert wanted <= len(place) <= wanted + 1
        own = place[str(token)]
        assert own["decoded_token"] == live.ask("/detokenize", {"tokens": [token]}).json["prompt"]
        ranked = sorted((each for each in place.values() if each["rank"]), key=lambda each: each["rank"])
        assert [each["rank"] for each in ranked] == [*range(1, wanted + 1)]
        assert [each["logprob"] for each in ranked] == sorted((e["logprob"] for e in ranked), reverse=True)
        assert own["rank"] or all(own["logprob"] <= each["logprob"] for each in ranked)
    events = live.ask(path, body | {"stream": True}).events
    streamed = [choice for event in events for choice in event["choices"] if "prompt_logprobs" in choice]
    assert [choice["prompt_logprobs"] for choice in streamed] == [found, found]
    assert {choice["index"] for choice in streamed} == {0, 1}
    assert "prompt_logprobs" not in live.ask(path, body | {"prompt_logprobs": None}).json["choices"][0]


def test_nothing_ends_before_min_tokens(live: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stop": "(", "return_token_ids": True}
    early = live.ask(COMPLETE, body).json["choices"][0]
    late = live.ask(COMPLETE, body | {"min_tokens": 25}).json["choices"][0]
    assert early["finish_reason"] == "stop" and len(early["token_ids"]) < 25 <= len(late["token_ids"])
    assert late["text"].startswith(early["text"] + "(")
    answer = live.ask(COMPLETE, body | {"min_tokens": 31})
    assert (answer.status, answer.error["param"]) == (400, "min_tokens")


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
            lambda text: set(json.loads(text, strict=False)) == {"name", "age"},
        ),
        ({"structured_outputs": {"json": PERSON}}, lambda text: set(json.loads(text)) == {"name", "age"}),
        ({"structured_outputs": {"regex": r"\d{3}-[a-f]{2,5};"}}, re.compile(r"\d{3}-[a-f]{2,5};").fullmatch),
        ({"structured_outputs": {"choice": ["red", "green"]}}, {"red", "green"}.__contains__),
        ({"structured_outputs": {"grammar": 'root ::= "ab" | "cd"'}}, {"ab", "cd"}.__contains__),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_structured_outputs_match_their_grammar(
    live: Live, fields: dict[str, Any], fits: Any, temperature: float
) -> None:
    settings = {"temperature": temperature, "seed": 3, "max_tokens": 200, "return_metrics": True, **fields}
    chat = {"messages": [{"role": "user", "content": "Give me one."}]}
    answers = [live.ask(COMPLETE, {"prompt": PROMPT} | settings), live.ask(CHAT, chat | settings)]
    for answer in answers:
        assert answer.status == 200, answer.json
        choice = answer.json["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            assert fits(text), text
    assert any(answer.json["choices"][0]["finish_reason"] == "stop" for answer in answers)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"structured_outputs": {"regex": "(", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs",
            "structured_outputs.choice cannot be []",
        ),
        ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs", "no text"),
        ({"structured_outputs": {"grammar": "root ::= root"}}, "structured_outputs", "no text"),
        (
            {"structured_outputs": {"json": {"$ref": "#"}}},
            "structured_outputs",
            "no text matches this grammar; give one that llguidance accepts",
        ),
        (
            {"structured_outputs": {"json": '{"type":"integer","minimum":1e308,"maximum":1e309}'}},
            "structured_outputs",
            "structured_outputs.json: ",
        ),
        ({"structured_outputs": {"json": "[" * 99}}, "structured_outputs", "structured_outputs.json: "),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
            "response_format",
            "response_format.json_schema.schema: Invalid type: odd",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "give one of json, json_object"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"colour": "red"}}, "structured_outputs", "colour"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "response_format.json_schema: it is required",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
            "structured_outputs",
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON | {"not": {}}}}},
            "response_format",
            'unsupported: ["not"]',
        ),
        (
            {"structured_outputs": {"json": {"type": "array", "items": {}, "uniqueItems": True}}},
            "structured_outputs",
            'structured_outputs.json: unsupported: ["uniqueItems"]',
        ),
        ({"guided_json": PERSON}, "guided_json", "structured_outputs"),
        ({"regex": "[0-9]{4}"}, "regex", "structured_outputs"),
    ],
    ids=str,
)
def test_an_invalid_grammar_is_named(live: Live, fields: dict[str, Any], param: str, says: str) -> None:
    answer = live.ask(COMPLETE, {"prompt": PROMPT, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert says in answer.error["message"]


def test_look_up_texts_are_flushed(live: Live) -> None:
    assert live.ask("/flush_cache", {}).json == {"status": "ok"}
    assert live.ask("/flush_cache").status == 405


def test_a_dead_end_grammar_fails_its_request_alone(live: Live) -> None:
    """Whatever the compiler accepts: another request of the same step continues."""
    dead = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"grammar": 'root ::= "a" b\nb ::= b "x"'}}
    with ThreadPoolExecutor(4) as pool:
        innocent = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        beside = pool.submit(live.ask, COMPLETE, innocent)
        found = list(pool.map(lambda _: live.ask(COMPLETE, dead), range(8)))
        assert beside.result().json["usage"]["completion_tokens"] == 300
    for answer in found:
        assert (answer.status, answer.error["param"]) == (400, "structured_outputs")
    assert total(live.metrics(), "specdec:failed_steps_total") == 0
    assert "no further token" in live.ask(COMPLETE, dead | {"stream": True}).failure["message"]


def test_texts_beyond_the_first_plane_are_whole(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 30, "structured_outputs": {"choice": ["🙂𝒳"]}}
    assert live.ask(COMPLETE, body).json["choices"][0]["text"] == "🙂𝒳"


@pytest.mark.parametrize("temperature", [3.5e38, 1e308])
def test_the_hottest_temperature_is_no_fault(live: Live, temperature: float) -> None:
    body = {"prompt": "x", "temperature": temperature, "seed": 1}
    for form in ({"structured_outputs": {"regex": "[ab]{5}"}}, {"min_tokens": 5}):
        assert live.ask(COMPLETE, body | form).status == 200


def test_a_chat_of_no_tokens_is_refused(live: Live) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for fields in ({"max_tokens": 0}, {"max_tokens": 5, "max_completion_tokens": 0}):
        answer = live.ask(CHAT, chat | fields)
        assert (answer.status, answer.error["param"]) == (400, list(fields)[-1])


def test_tokens_of_partial_characters_are_distinguished(live: Live) -> None:
    text = "x = 'naïve 漢字🙂' + y"
    body = {"prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 3}
    choice = live.ask(COMPLETE, body).json["choices"][0]
    found = choice["logprobs"]
    assert any(token.startswith("bytes:\\x") for token in found["tokens"])
    columns = zip(
        found["tokens"], found["text_offset"], found["token_logprobs"], found["top_logprobs"], strict=True
    )
    for token, offset, logprob, top in columns:
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
        assert top is None or top[token] == logprob
    chat = {
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
        "temperature": 0,
        "max_tokens": 30,
        "structured_outputs": {"choice": ["漢字🙂"]},
    }
    answer = live.ask(CHAT, chat).json["choices"][0]
    pieces = b"".join(bytes(own["bytes"]) for own in answer["logprobs"]["content"])
    assert (
        pieces.decode().startswith(answer["message"]["content"]) and answer["message"]["content"] == "漢字🙂"
    )


def test_the_finish_reason_is_reported(live: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    (whole,) = live.ask(COMPLETE, body).json["choices"]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("length", None)
    token = whole["token_ids"][4]
    (ended,) = live.ask(COMPLETE, body | {"stop_token_ids": [token]}).json["choices"]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", token)
    sign = next(letter for letter in reversed(whole["text"]) if letter.isprintable())
    (cut,) = live.ask(COMPLETE, body | {"stop": [sign]}).json["choices"]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", sign)


@pytest.mark.parametrize("form", ["json_schema", "json_object"])
def test_json_has_no_runs_of_blanks(live: Live, form: str) -> None:
    """Outside strings there are no two adjacent blanks, at any temperature and seed."""
    given: dict[str, Any] = {"type": form}
    if form == "json_schema":
        given["json_schema"] = {"name": "person", "schema": PERSON}
    for seed, temperature in enumerate((0.7, 0.7, 0.7, 1.0, 1.5, 1.5)):
        body = {"prompt": PROMPT, "max_tokens": 120, "temperature": temperature, "seed": seed}
        (choice,) = live.ask(COMPLETE, body | {"response_format": given}).json["choices"]
        bare = re.sub(r'"(?:[^"\\]|\\.)*(?:"|$)', '""', choice["text"])
        assert not re.search(r"\s\s", bare), choice["text"]
        if choice["finish_reason"] == "stop":
            json.loads(choice["text"])
