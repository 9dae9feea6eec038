"""Ignored fields and tools are named in a header; chats that end at their limit."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from specdec.errors import ConfigError
from specdec.server.fields import IGNORED, LONGEST_NAME, MOST_NAMES, IgnoredFields
from specdec.server.settings import ServerConfig
from specdec.text.generation_config import longest_answer
from tests.selection import only
from tests.server.live import Live, serving
from tests.server.test_guards import PLAIN
from tests.server.tools.scripted import write_scripted
from tests.server.tools.test_calls import WEATHER

HI: list[Any] = [{"role": "user", "content": "x = 1"}]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ messages[-1].content[-1:] }}"
SAID = "Sunny."


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """The shipped model, whose template has no tools."""
    yield from serving(*PLAIN)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model whose chat template has no tools, with its own max_new_tokens."""
    folder = tmp_path_factory.mktemp("scripted") / "plain"
    write_scripted(folder, {"1": SAID}, TEMPLATE, tags="1")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3}))
    with Live(*PLAIN, model=str(folder)) as own:
        yield own


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1, "stream": True}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}),
        ("/tokenize", {"prompt": "x", "model": "tiny"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_unknown_fields_are_named_in_the_answers_head(live: Live, path: str, body: dict[str, Any]) -> None:
    assert IGNORED not in live.ask(path, body).headers
    answer = live.ask(path, {**body, "top_a": 0.2, "max_tokenz": None, "mirostat": 2})
    assert (answer.status, answer.headers[IGNORED]) == (200, "top_a, mirostat")


def test_fields_without_effect_are_not_listed(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 1, "user": "me", "metadata": {"a": "b"}}
    assert IGNORED not in live.ask("/v1/completions", body).headers
    assert live.ask("/v1/completions", {**body, "logits_processors": ["x"]}).status == 400


def test_an_error_names_them_too(live: Live) -> None:
    answer = live.ask("/v1/completions", {"prompt": "x", "temperature": -1, "temprature": 1})
    assert (answer.status, answer.headers[IGNORED]) == (400, "temprature")


def test_no_name_breaks_out_of_the_header_and_their_number_is_bounded(live: Live) -> None:
    wild = {"a\r\nSet-Cookie: b": 1, "é, f": 1, "x" * 999: 1, **{f"f{i}": 1 for i in range(40)}}
    answer = live.ask("/v1/completions", {"prompt": "x", "max_tokens": 1, **wild})
    first, second, third, *rest = answer.headers[IGNORED].split(", ")
    assert (first, second, third) == ("a__Set-Cookie__b", "___f", "x" * LONGEST_NAME)
    assert len(rest) == MOST_NAMES - 3 + 1 and rest[-1] == f"+{len(wild) - MOST_NAMES}"
    assert "Set-Cookie" not in answer.headers


def test_the_log_says_each_name_once() -> None:
    with Live(*PLAIN) as live:
        for _ in range(3):
            live.ask("/v1/completions", {"prompt": "x", "max_tokens": 1, "mirostat": 2})
        assert sum("field mirostat" in line for line in live.stop()[1].splitlines()) == 1


def test_the_official_client_may_send_any_field(live: Live) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        answer = client.completions.with_raw_response.create(
            model="tiny", prompt="x", max_tokens=1, extra_body={"repeat_last_n": 64}
        )
    assert answer.headers[IGNORED] == "repeat_last_n" and answer.parse().choices


@pytest.mark.parametrize("choice", ["auto", openai.omit])
@pytest.mark.parametrize("stream", [False, True])
def test_tools_unsupported_by_the_template_give_text(scripted: Live, choice: Any, stream: bool) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 20, "temperature": 0}
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="any", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="plain", messages=[{"role": "user", "content": "Ask 1"}], stream=stream, **fields
        )
        if stream:
            text = "".join(part.choices[0].delta.content or "" for part in raw.parse())
        else:
            message = raw.parse().choices[0].message
            text = message.content
            assert message.tool_calls is None
    assert text == SAID
    assert raw.headers[IGNORED] == ("tools, tool_choice" if choice == "auto" else "tools")
    info = scripted.ask("/server_info").json
    assert (info["tools"], info["tool_call_parser"], info["reasoning_parser"]) == (False, None, None)


def test_a_required_call_is_refused_without_template_support(scripted: Live) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = {"messages": HI, "tools": [WEATHER], "tool_choice": choice}
        assert scripted.ask("/v1/chat/completions", body).error["param"] == "tools"
    found = scripted.ask("/tokenize", {"messages": HI, "tools": [WEATHER]})
    assert found.headers[IGNORED] == "tools"
    assert found.json == scripted.ask("/tokenize", {"messages": HI}).json


def test_a_chat_without_max_tokens_has_a_default(live: Live, scripted: Live, tmp_path: Path) -> None:
    def length(server: Live, **fields: Any) -> tuple[str, int]:
        answer = server.ask("/v1/chat/completions", {"messages": HI, "ignore_eos": True, **fields}).json
        return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    assert length(scripted) == ("length", 3)
    assert length(scripted, max_tokens=5) == length(scripted, max_completion_tokens=5) == ("length", 5)
    assert length(scripted, min_tokens=7) == ("length", 7)
    with Live(*PLAIN, "--default-max-tokens", "9") as bounded:
        assert length(bounded) == ("length", 9)
        assert length(bounded, max_tokens=11) == ("length", 11)
        prompt = bounded.ask("/v1/completions", {"prompt": "x", "ignore_eos": True}).json
        assert prompt["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("option", only([[]], [[], ["--default-max-tokens", "2147483648"]]))
def test_no_default_is_longer_than_the_model_reads(option: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    write_scripted(folder, {"1": SAID}, TEMPLATE, tags="1")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3_000_000_000}))
    with Live(*PLAIN, "--max-model-len", "64", *option, model=str(folder)) as own:
        answer = own.ask("/v1/chat/completions", {"messages": HI, "ignore_eos": True})
    assert answer.status == 200 and answer.json["usage"]["total_tokens"] == 64


@pytest.mark.parametrize("most", [0, 3_000_000_000, True])
def test_an_invalid_default_is_refused(most: object) -> None:
    with pytest.raises(ConfigError, match="default_max_tokens"):
        ServerConfig.model_validate({"default_max_tokens": most})


@pytest.mark.parametrize("said", [True, 0, -1, 3.5, "9", None])
def test_an_invalid_length_in_a_checkpoint_is_ignored(said: object, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": said}))
    assert longest_answer(tmp_path) is None


def test_a_field_name_of_megabytes_is_truncated_first() -> None:
    """Cleaning a name of 16 MB as a whole would block the event loop for seconds."""
    ignored, names = IgnoredFields(), ["!" * (1 << 20)] * MOST_NAMES
    tracemalloc.start()
    try:
        headers = ignored.headers(names)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert headers == {IGNORED: ", ".join(["_" * LONGEST_NAME] * MOST_NAMES)}
    assert peak < 1 << 20
