"""Request fields: which are refused, and how they interact."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from specdec.config.sampling import MAX_IDS, SamplingParams
from specdec.config.structured import Structure
from specdec.config.tenant import SOLE
from specdec.errors import ConfigError
from specdec.server.anthropic.bodies import MessageBody
from specdec.server.bodies import ChatBody, CompletionBody, RequestBody
from specdec.server.failures import Failure
from specdec.server.fields import HARMLESS, INSTEAD, MOST_LEVELS, REFUSED, given_fields
from specdec.server.messages import as_read
from specdec.server.parse import MOST_PARTS, MOST_VALUES, SMALL, parse
from specdec.server.plain import DetokenizeBody, TokenizeBody
from specdec.server.responses.bodies import ResponseBody
from specdec.server.state import LONG, LONG_TEXT, ServedModel
from specdec.server.thinking import template_variables
from specdec.server.threads import LONG_S, ThreadPool
from specdec.text.chat_template import ChatTemplate

API = Path(__file__).parents[2] / "docs" / "api.md"
PROMPT: dict[str, Any] = {"prompt": "x"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
BODIES: tuple[tuple[type[RequestBody], Mapping[str, Any]], ...] = ((CompletionBody, PROMPT), (ChatBody, CHAT))


def read(kind: type[RequestBody], least: Mapping[str, Any], **fields: Any) -> Any:
    return kind.read(json.dumps({**least, **fields}).encode())


def refusal(kind: type[RequestBody], least: Mapping[str, Any], **fields: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        read(kind, least, **fields)
    assert caught.value.status == 400
    return caught.value


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"a": schema}
    return schema


PLACES: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
    lambda schema: {"structured_outputs": {"json": schema}},
    lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
    lambda schema: {"unheard_of": schema},
    lambda schema: {"messages": [{"role": "user", "content": "x", "unheard_of": schema}]},
    lambda schema: {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
)


@pytest.mark.parametrize("place", PLACES)
def test_deep_nesting_is_refused_in_every_field(
    place: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    for levels in (MOST_LEVELS, 300, 600):
        failure = refusal(ChatBody, CHAT, **place(nested(levels)))
        assert "levels" in str(failure) and "\n" not in str(failure)
        large = refusal(ChatBody, CHAT, **place(nested(levels)), padding="x" * SMALL)
        assert str(large) == str(failure), "parsed in Python, it comes to the end of the stack sooner"
    body = read(ChatBody, CHAT, **place(nested(MOST_LEVELS - 8)))
    assert as_read(body.messages) and body.params({})


@pytest.mark.parametrize("around", ["", "x" * SMALL])
def test_nesting_too_deep_for_either_parser_is_named(around: str) -> None:
    text = json.dumps({**CHAT, "unheard_of": around})[:-1]
    for levels in (250, 100_000):
        with pytest.raises(Failure, match=f"nests more than {MOST_LEVELS} levels"):
            given_fields(f'{text}, "deep": {"[" * levels}{"]" * levels}}}'.encode())


@pytest.mark.parametrize(
    "value",
    [
        dict.fromkeys(map(str, range(MOST_PARTS))),
        [{} for _ in range(MOST_PARTS)],
        [[[] for _ in range(300)] for _ in range(MOST_PARTS // 300)],
    ],
)
def test_bodies_of_too_many_parts_are_refused(value: object) -> None:
    assert "objects, fields and lists" in str(refusal(ChatBody, CHAT, unheard_of=value))
    assert as_read(read(ChatBody, CHAT, unheard_of=[0] * 2 * MOST_PARTS).messages)


@pytest.mark.parametrize(
    "value", [{"a": [1, -2.5e3, "é\\n", None, True, {}, [[]]], "b": {"": 1}}, [], "x", 3, {"a": 1, "b": [{}]}]
)
def test_large_bodies_are_parsed_like_small_ones(value: object) -> None:
    """The second parser lets other threads run; it takes texts beyond `SMALL` bytes."""
    text = json.dumps(value)
    assert parse((text + " " * SMALL).encode()) == parse(text.encode()) == value
    broken = (text + ",", text[:-1] + "\x00", "[" + text, '{"a" ' + text + "}", "[" * 10**5)
    for wrong in (*broken, "[1\u0663]", "[1.\u0663]", "[1e\u0663]"):
        for filled in (wrong, " " * SMALL + wrong):
            with pytest.raises((ValueError, RecursionError)):
                parse(filled.encode())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" + "[]," * MOST_PARTS, "objects, fields and lists"),
        ("[" + "{}," * MOST_PARTS, "objects, fields and lists"),
        ("{" + '"a": 1, ' * MOST_PARTS, "objects, fields and lists"),
        ('{"a": [' + "1," * MOST_VALUES + "1,", f"{MOST_VALUES:,} values"),
    ],
    ids=["lists", "objects", "fields", "numbers"],
)
def test_parsing_stops_at_the_limit(text: str, says: str) -> None:
    with pytest.raises(Failure, match=says):
        parse((text + "no JSON").encode())


PICTURE = {"image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"content": "x", "images": ["eA=="]}, "messages.0: images is not supported"),
        ({"content": "x", "image_url": "data:,x"}, "messages.0: image_url is not supported"),
        (
            {"content": [{"type": "text", "text": "x", "image_url": {"url": "x"}}]},
            "messages.0.content.0: image_url is not supported",
        ),
        (
            {"content": [{"type": "image_url", "image_url": None}]},
            "messages.0.content: a part of type",
        ),
    ],
)
def test_pictures_are_refused_wherever_they_stand(message: dict[str, Any], where: str) -> None:
    with pytest.raises(Failure, match=re.escape(where)) as caught:
        as_read(read(ChatBody, {"messages": [{"role": "user", **message}]}).messages)
    assert caught.value.param == "messages"
    assert as_read(read(ChatBody, {"messages": [{"role": "user", "content": "x", "audio": None}]}).messages)


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"prompt": [1.5] * 1000}, 4),
        ({"prompt": [["a"]] * 1000}, 4),
        ({"prompt": "a", "stop": [0] * 1000}, 2),
        ({"prompt": "a", "stop_token_ids": ["a"] * 1000}, 1),
        ({"prompt": "a", "messages": [0] * 1000}, 1),
        ({"prompt": "a", "messages": [{"role": "user", "content": [0] * 1000}]}, 1),
    ],
)
def test_the_first_of_many_errors_is_reported(fields: dict[str, Any], kinds: int) -> None:
    with pytest.raises(ValidationError) as raised:
        (ChatBody if "messages" in fields else CompletionBody).model_validate(fields)
    assert raised.value.error_count() <= kinds


def test_numbers_that_no_token_has_are_put_into_no_table() -> None:
    """They could be chosen to collide, so that each is compared with all before it."""
    SamplingParams(stop_token_ids=[1] * (MAX_IDS + 1))
    with pytest.raises(ConfigError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[1 << 61] * (MAX_IDS + 1))
    assert refusal(CompletionBody, {"prompt": "a"}, logit_bias={str(1 << 61): 0}).param == "logit_bias"


@pytest.mark.parametrize(
    ("fields", "beside"),
    [
        ({}, False),
        ({"allowed_token_ids": range(2 * LONG)}, True),
        ({"stop_token_ids": range(2 * LONG)}, True),
        ({"structured_outputs": Structure(regex="a" * (LONG + 1))}, True),
        ({"bad_words": ["a" * 1000] * 40}, True),
    ],
)
def test_long_lists_are_validated_once_and_in_threads(fields: dict[str, Any], beside: bool) -> None:
    looked: list[threading.Thread] = []
    engine = SimpleNamespace(
        compile_grammar=lambda _, tenant: None,
        read_terms=lambda *_, tenant: looked.append(threading.current_thread()),
        read_prompt=lambda prompt, terms: prompt,
    )
    served: Any = ServedModel.__new__(ServedModel)
    served._workers, served._is_slow = ThreadPool("text", 1), False
    served.resident, served.config = SimpleNamespace(engine=engine), SimpleNamespace(log_prompts=False)
    assert asyncio.run(served.prepare(["x"] * 64, SamplingParams(**fields), SOLE)) == ["x"] * 64
    assert [own is not threading.main_thread() for own in looked] == [beside]


def test_long_texts_are_tokenised_in_threads() -> None:
    """Long texts always; short ones after one was slow, as with a regex that backtracks."""
    ran: list[bool] = []

    def encode(text: str, *, special: bool) -> list[int]:
        ran.append(threading.current_thread() is threading.main_thread())
        end_s = time.thread_time() + (2 * LONG_S if "slow" in text else 0)
        while time.thread_time() < end_s:
            pass
        return [1]

    served: Any = ServedModel.__new__(ServedModel)
    served._workers, served._is_slow = ThreadPool("text", 1), False
    served.resident = SimpleNamespace(engine=SimpleNamespace(tokenizer=SimpleNamespace(encode=encode)))
    for text in ("x", "x" * (LONG_TEXT + 1), "x", "slow", "x"):
        asyncio.run(served.encode(text, ""))
    assert ran == [True, False, True, True, False]


def listed(beginning: str) -> set[str]:
    """Return the names in a paragraph of the documentation, except supported fields."""
    (paragraph,) = (part for part in API.read_text("utf-8").split("\n\n") if part.startswith(beginning))
    return {*re.findall(r"`(\w+)`", paragraph)} - {*RequestBody.model_fields}


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_every_sampling_parameter_can_be_given_over_http(kind: type[RequestBody]) -> None:
    """Except marks (`cache_control` of messages), trees (`return_drafts`) and thinking (the template's)."""
    others = SamplingParams.model_fields.keys() - kind.model_fields.keys()
    assert others == {"cache_marks", "trees", "thinking"}


def test_the_documentation_lists_refused_fields() -> None:
    assert listed("Refused by name") == {*REFUSED}
    assert listed("Accepted without effect") == {*HARMLESS}
    assert not HARMLESS & {*REFUSED} and {*INSTEAD} <= {*REFUSED}


@pytest.mark.parametrize(("kind", "least"), BODIES)
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_fields_are_refused_by_name(
    kind: type[RequestBody], least: Mapping[str, Any], name: str
) -> None:
    """A body that has the field validates it itself."""
    if name in kind.model_fields:
        return
    for value in ("x" * 5, 7, [1], {"a": 1}):
        failure = refusal(kind, least, **{name: value})
        assert failure.param == name and str(failure).startswith(f"{name}: ")
    for idle in (*REFUSED[name], None):
        read(kind, least, **{name: idle})


@pytest.mark.parametrize(("kind", "least"), BODIES)
def test_redundant_fields_are_accepted(kind: type[RequestBody], least: Mapping[str, Any]) -> None:
    read(kind, least, best_of=1)
    read(kind, least, best_of=3, n=3)
    for fields in ({"best_of": 3}, {"best_of": 3, "n": 2}, {"best_of": 1, "n": 2}):
        assert refusal(kind, least, **fields).param == "best_of"
    read(kind, least, max_tokens=5, max_completion_tokens=5, max_new_tokens=5)
    assert "give max_tokens" in str(refusal(kind, least, max_new_tokens=5))
    assert refusal(kind, least, min_tokens=3, min_new_tokens=4).param == "min_new_tokens"


@pytest.mark.parametrize(("kind", "least"), BODIES)
def test_fields_without_effect_are_accepted(kind: type[RequestBody], least: Mapping[str, Any]) -> None:
    own = {name: "x" for name in HARMLESS - {*kind.model_fields}}
    assert read(kind, least, **own, unheard_of=[1]).params({}) == SamplingParams()


@pytest.mark.parametrize(("kind", "least"), BODIES)
def test_options_of_a_stream_belong_to_one(kind: type[RequestBody], least: Mapping[str, Any]) -> None:
    for options in ({"include_usage": True}, {"include_usage": False}):
        for fields in ({}, {"stream": False}):
            failure = refusal(kind, least, stream_options=options, **fields)
            assert failure.param == "stream_options" and "stream to true" in str(failure)
        assert read(kind, least, stream_options=options, stream=True).stream_options
    read(kind, least, stream_options=None)
    read(kind, least, stream_options={})


@pytest.mark.parametrize(
    ("source", "fields", "variables", "ignored"),
    [
        ("{{ enable_thinking }}", {}, {"a": 1}, []),
        ("{{ reasoning_effort }}", {"reasoning_effort": "low"}, {"a": 1, "reasoning_effort": "low"}, []),
        ("{{ enable_thinking }}", {"reasoning_effort": "minimal"}, {"a": 1, "enable_thinking": False}, []),
        ("{{ thinking }}", {"reasoning_effort": "medium"}, {"a": 1, "thinking": True}, []),
        ("{{ thinking }}", {"enable_thinking": False}, {"a": 1, "thinking": False}, []),
        (
            "{{ thinking }}{{ reasoning_effort }}",
            {"reasoning_effort": "high", "enable_thinking": False},
            {"a": 1, "reasoning_effort": "high", "thinking": False},
            [],
        ),
        (
            "{{ thinking }}",
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False, "a": 2}},
            {"a": 2, "thinking": False},
            ["chat_template_kwargs.a"],
        ),
        (
            "",
            {"reasoning_effort": "low", "enable_thinking": True},
            {"a": 1},
            ["reasoning_effort", "enable_thinking"],
        ),
    ],
)
def test_a_template_hears_how_to_think(
    source: str, fields: dict[str, Any], variables: dict[str, Any], ignored: list[str]
) -> None:
    template = ChatTemplate(source, {}, where=Path("folder"))
    assert template_variables(read(ChatBody, CHAT, **fields), template, {"a": 1}) == (variables, ignored)


def test_an_effort_is_a_text_and_budgets_are_one() -> None:
    assert refusal(ChatBody, CHAT, reasoning_effort=3).param == "reasoning_effort"
    assert refusal(ChatBody, CHAT, enable_thinking="no").param == "enable_thinking"
    assert read(ChatBody, CHAT, thinking_budget=3, thinking_token_budget=3).budget
    assert refusal(ChatBody, CHAT, thinking_budget=-1).param == "thinking_budget"


def test_special_tokens_are_the_templates_own() -> None:
    read(ChatBody, CHAT, add_special_tokens=False)
    assert refusal(ChatBody, CHAT, add_special_tokens=True).param == "add_special_tokens"


@pytest.mark.parametrize(
    ("fields", "scored"),
    [
        ({}, None),
        ({"echo": True}, None),
        ({"logprobs": 3}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "max_tokens": 0}, 0),
        ({"echo": True, "max_tokens": 0, "logprobs": 2}, 2),
        ({"prompt_logprobs": 0}, 0),
        ({"prompt_logprobs": 4, "logprobs": 1}, 4),
        ({"prompt_logprobs": 4, "echo": True}, 4),
        ({"prompt_logprobs": 4, "echo": True, "logprobs": 4}, 4),
    ],
    ids=str,
)
def test_every_request_can_score_its_prompt(fields: dict[str, Any], scored: int | None) -> None:
    assert read(CompletionBody, PROMPT, **fields).scored == scored


def test_an_echo_has_one_number_of_alternatives() -> None:
    body = read(CompletionBody, PROMPT, prompt_logprobs=4, echo=True, logprobs=2)
    with pytest.raises(Failure, match="as many as logprobs, 2") as caught:
        _ = body.scored
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": "many"}, "max_tokens: give an integer."),
        ({"max_tokens": 1.5}, "max_tokens: give an integer."),
        ({"temperature": "hot"}, "temperature: give a number."),
        ({"temperature": "inf"}, "temperature: give a finite number."),
        ({"stream": "perhaps"}, "stream: give true or false."),
        ({"model": 7}, "model: give a string."),
        ({"stop_token_ids": 7}, "stop_token_ids: give a list."),
        ({"logit_bias": [7]}, "logit_bias: give an object."),
        ({"logit_bias": {"a": 1}}, "logit_bias.a: give an integer."),
        ({"stream_options": 7}, "stream_options: give an object."),
        (
            {"response_format": {"type": "x"}},
            'response_format.type: give "text", "json_object" or "json_schema".',
        ),
        ({"structured_outputs": {"a": 1}}, "structured_outputs.a: it is not a known field; leave it out."),
        (
            {"keep_alive": [1]},
            "keep_alive: give seconds, or a string such as 30s, 5m or 2h; -1 keeps the model loaded.",
        ),
        ({"top_logprobs": 21}, "top_logprobs: give a number of at most 20."),
        ({"thinking_budget": -1}, "thinking_budget: give a number of at least 0."),
        ({"messages": []}, "messages: give at least 1."),
        ({"messages": None}, "messages: it is required."),
    ],
)
def test_validation_errors_are_plain_sentences(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(Failure) as caught:
        ChatBody.read(json.dumps(CHAT | fields).encode())
    assert str(caught.value) == says


@pytest.mark.parametrize("prompt", [5, [1, "a"], [["a"]], [1.5], ["a", [1]], {"a": 1}])
def test_an_invalid_prompt_is_answered_with_the_valid_kinds(prompt: object) -> None:
    with pytest.raises(Failure, match="prompt: give a string, token ids, or") as caught:
        CompletionBody.read(json.dumps({"prompt": prompt}).encode())
    assert caught.value.param == "prompt"


LISTS = (
    CompletionBody,
    ChatBody,
    ResponseBody,
    MessageBody,
    TokenizeBody,
    DetokenizeBody,
    SamplingParams,
    Structure,
)
MANY = 65


def lists_within(schema: object) -> Iterator[Mapping[str, Any]]:
    """Yield the list schemas within a pydantic core schema."""
    left = [schema]
    while left:
        own = left.pop()
        if isinstance(own, Mapping):
            left += own.values()
            if own.get("type") == "list" and own.get("items_schema", {"type": "any"})["type"] != "any":
                yield own
        elif isinstance(own, list | tuple):
            left += own


@pytest.mark.parametrize("kind", LISTS)
def test_of_a_long_list_one_mistake_is_collected(kind: type[BaseModel]) -> None:
    """Collecting those of half a million elements holds the GIL for seconds."""
    kind.model_rebuild()
    found = [
        own for own in lists_within(kind.__pydantic_core_schema__) if own.get("max_length", MANY) >= MANY
    ]
    assert found and all(own.get("fail_fast") for own in found)
