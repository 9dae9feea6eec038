"""The official client parses the server's answers, and raises its own exceptions on errors."""

import asyncio
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.live import Live, serving

TEXT = "class Stack:\n    def "


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    yield from serving("--api-key", "given", "--max-queued", "4")


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="given", max_retries=0) as own:
        yield own


def test_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    fields = {"model": "tiny", "prompt": TEXT, "max_tokens": 24, "temperature": 0.0, "logprobs": 1}
    whole = client.completions.create(**fields)  # type: ignore[call-overload]
    assert whole.usage and whole.usage.completion_tokens == 24
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens >= 0
    parts = list(client.completions.create(**fields, stream=True))  # type: ignore[call-overload]
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [t for part in parts for t in part.choices[0].logprobs.tokens] == whole.choices[0].logprobs.tokens
    assert parts[-1].choices[0].finish_reason == "length"


def test_vllms_sampling_rules_combine_with_openais_fields(client: openai.OpenAI) -> None:
    fields = {"model": "tiny", "prompt": TEXT, "max_tokens": 24, "temperature": 0.0}
    free = client.completions.create(**fields).choices[0].text  # type: ignore[call-overload]
    word = next(own for own in free.split() if own.isidentifier())
    for stream in (False, True):
        rules = {"bad_words": [word], "include_stop_str_in_output": True, "best_of": 1}
        own = client.completions.create(**fields, stream=stream, stop=["):"], extra_body=rules)  # type: ignore[call-overload]
        text = "".join(part.choices[0].text for part in own) if stream else own.choices[0].text
        assert word not in text and text.find("):") in (-1, len(text) - 2)
    only = {"allowed_token_ids": [5, 6], "skip_special_tokens": False, "return_token_ids": True}
    for body in (fields, {**fields, "prompt": None, "messages": [{"role": "user", "content": TEXT}]}):
        create = client.chat.completions.create if "messages" in body else client.completions.create
        own = create(**{k: v for k, v in body.items() if v is not None}, extra_body=only)
        assert {*own.choices[0].token_ids} <= {5, 6}
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(**fields, extra_body={"best_of": 3})  # type: ignore[call-overload]


def test_chats_whole_and_streamed(client: openai.OpenAI) -> None:
    fields = {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Python."}, {"role": "user", "content": TEXT}],
        "max_completion_tokens": 24,
        "temperature": 0.7,
        "seed": 5,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**fields)  # type: ignore[call-overload]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert len(whole.choices[0].logprobs.content) == 24
    texts = ["", ""]
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    *parts, last = list(stream)
    assert last.usage.total_tokens == whole.usage.total_tokens and not last.choices
    for part in parts:
        texts[part.choices[0].index] += part.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_unknown_fields_are_sent_as_extra_body(client: openai.OpenAI) -> None:
    extra = {"top_k": 5, "min_p": 0.05, "ignore_eos": True, "return_token_ids": True, "return_metrics": True}
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=8, seed=1, extra_body=extra)
    assert len(answer.choices[0].token_ids) == 8  # type: ignore[attr-defined]
    assert answer.metrics["speculative_decoding"]["acceptance_length"] >= 1  # type: ignore[attr-defined]


def test_models_and_errors(client: openai.OpenAI, live: Live) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "specdec"
    with pytest.raises(openai.NotFoundError, match="served"):
        client.completions.create(model="other", prompt=TEXT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=TEXT, temperature=-1.0)
    assert caught.value.param == "temperature"
    stranger = openai.OpenAI(base_url=f"{live.url}/v1", api_key="other", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_leaving_a_stream_ends_its_request(client: openai.OpenAI, live: Live) -> None:
    with client.completions.create(model="tiny", prompt=TEXT, max_tokens=900, stream=True) as stream:
        next(iter(stream))
    left = client.completions.create(model="tiny", prompt=TEXT, max_tokens=2)
    assert left.usage and left.usage.completion_tokens == 2


class Animal(BaseModel):
    name: str = Field(pattern="^[a-z]{1,6}$")
    kind: Literal["cat", "dog"]
    legs: list[int] = Field(max_length=2)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_schema_becomes_an_object(client: openai.OpenAI, temperature: float) -> None:
    messages = [{"role": "user", "content": "An animal."}]
    answer = client.chat.completions.parse(
        model="tiny",
        messages=messages,  # type: ignore[arg-type]
        response_format=Animal,
        temperature=temperature,
        seed=2,
        max_tokens=500,
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)
    with client.chat.completions.stream(
        model="tiny",
        messages=messages,  # type: ignore[arg-type]
        response_format=Animal,
        temperature=temperature,
        seed=2,
        max_tokens=500,
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_a_refused_client_retries(live: Live) -> None:
    asyncio.run(_come_again(f"{live.url}/v1"))


async def _come_again(url: str) -> None:
    """Four choices may be in flight; twelve arrive at once, and retries serve them all."""
    async with openai.AsyncOpenAI(base_url=url, api_key="given", max_retries=60) as client:
        asked = [
            client.completions.create(
                model="tiny", prompt=TEXT, max_tokens=200, seed=i, extra_body={"ignore_eos": True}
            )
            for i in range(12)
        ]
        answers = await asyncio.gather(*asked)
    assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [200] * 12
    async with openai.AsyncOpenAI(base_url=url, api_key="given", max_retries=0) as client:
        asked = [client.completions.create(model="tiny", prompt=TEXT, max_tokens=300) for _ in range(12)]
        found = await asyncio.gather(*asked, return_exceptions=True)
    assert any(isinstance(own, openai.RateLimitError) for own in found)
