"""The `openai` client through published routers: the texts of one server, with fetched prompts."""

import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest

from tests.selection import EXHAUSTIVE
from tests.server.live import Live, total
from tests.server.reach.pairs import EXACT, WAIT_S, has_nixl
from tests.server.reach.routers import Pair, paired, sglang_router, toy_proxy

KEY = "a-key-of-the-tests"
SALTS = map("salt-{}".format, itertools.count())
TEXT = "".join(f"class Parser{number}:\n    def parse(self, text):\n" for number in range(12))

pytestmark = [has_nixl, EXHAUSTIVE]

needs_sglang_router = pytest.mark.skipif(
    not importlib.util.find_spec("sglang_router"), reason="sglang-router is not installed"
)
ROUTERS = [
    pytest.param(sglang_router, marks=needs_sglang_router, id="sglang-router"),
    pytest.param(toy_proxy, id="toy-proxy"),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with paired(key=KEY) as pair:
        yield pair


@pytest.fixture(scope="module")
def alone() -> Iterator[openai.OpenAI]:
    with Live(*EXACT) as live, client(live.url) as own:
        yield own


@pytest.fixture(scope="module", params=ROUTERS)
def routed(request: pytest.FixtureRequest, pair: Pair) -> Iterator[openai.OpenAI]:
    start: Callable[[Pair], AbstractContextManager[str]] = request.param
    with start(pair) as url, client(url) as own:
        yield own


def client(url: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60.0)


def asked(prompt: str | list[str], **own: Any) -> dict[str, Any]:
    """Return the fields of a completion that no cache contains."""
    extra = {"ignore_eos": True, "cache_salt": next(SALTS)}
    return {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "extra_body": extra, **own}


def texts(answer: Any) -> list[str]:
    return [choice.text for choice in answer.choices]


def is_fetched(usage: Any, prompts: int = 1) -> bool:
    """Return whether all but the last token of each prompt were fetched."""
    cached: int = usage.prompt_tokens_details.cached_tokens
    return cached == usage.prompt_tokens - prompts


def test_whole(alone: openai.OpenAI, routed: openai.OpenAI) -> None:
    drawn = {"temperature": 0.8, "seed": 7}
    for own in ({}, drawn, {**drawn, "n": 2}):
        body = asked(TEXT, **own)
        answer, expected = routed.completions.create(**body), alone.completions.create(**body)
        assert texts(answer) == texts(expected)
        assert is_fetched(answer.usage)


def test_logprobs(alone: openai.OpenAI, routed: openai.OpenAI) -> None:
    body = asked(TEXT, logprobs=2)
    answer, expected = (own.completions.create(**body).choices[0].logprobs for own in (routed, alone))
    assert answer and expected and answer.tokens == expected.tokens
    assert answer.token_logprobs == pytest.approx(expected.token_logprobs)


def test_streamed(alone: openai.OpenAI, routed: openai.OpenAI) -> None:
    body = asked(TEXT)
    events = [*routed.completions.create(**body, stream=True, stream_options={"include_usage": True})]
    said = "".join(choice.text for event in events for choice in event.choices)
    assert [said] == texts(alone.completions.create(**body))
    assert len(events) > 3 and is_fetched(events[-1].usage)


@pytest.mark.parametrize("n", [1, 2])
def test_chat(alone: openai.OpenAI, routed: openai.OpenAI, n: int) -> None:
    messages: Any = [{"role": "user", "content": f"{next(SALTS)} {TEXT}"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0.8, "seed": 3, "n": n}
    answer = routed.chat.completions.create(**body)
    expected = alone.chat.completions.create(**body)
    assert [choice.message.content for choice in answer.choices] == [
        choice.message.content for choice in expected.choices
    ]
    assert is_fetched(answer.usage)


def test_a_list_of_prompts(alone: openai.OpenAI, routed: openai.OpenAI) -> None:
    body = asked([TEXT, f"import os\n{TEXT}", f"import sys\n{TEXT}"])
    answer = routed.completions.create(**body)
    assert texts(answer) == texts(alone.completions.create(**body))
    assert is_fetched(answer.usage, prompts=3)


def test_a_client_that_hangs_up_leaves_nothing(pair: Pair, routed: openai.OpenAI) -> None:
    for _ in range(3):
        stream = routed.completions.create(**asked(TEXT, max_tokens=3000), stream=True)
        assert next(iter(stream)).choices
        stream.close()
    until_s = time.monotonic() + WAIT_S
    while any(held(live) for live in (pair.prefill, pair.decode)):
        assert time.monotonic() < until_s, (held(pair.prefill), held(pair.decode))
        time.sleep(0.1)


def held(live: Live) -> dict[str, float]:
    """Return the nonzero metrics of requests that a server still holds."""
    figures = live.metrics()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    names += ("specdec:reach_leases", "specdec:reach_fetching", "specdec:reach_quarantined")
    return {name: value for name in names if (value := total(figures, name))}


def test_keys_pass_and_are_asked_for(routed: openai.OpenAI) -> None:
    with (
        client(str(routed.base_url).removesuffix("/v1/"), "another-key") as other,
        pytest.raises(openai.APIStatusError) as error,
    ):
        other.completions.create(**asked(TEXT))
    assert error.value.status_code in (401, 500)  # sglang-router wraps unknown errors
    assert "key" in str(error.value).lower()


def test_bad_input_is_told_to_the_client(routed: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p"):
        routed.completions.create(**asked(TEXT, top_p=7.0))


@needs_sglang_router
def test_sglang_router_learns_the_models_name(pair: Pair) -> None:
    """It asks for the name with its own key."""
    with sglang_router(pair, "--api-key", KEY) as url, client(url) as own:
        assert [model.id for model in own.models.list()] == ["tiny"]
