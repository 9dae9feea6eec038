"""Two servers behind sglang-router with its cache-aware policy, called by the official client."""

import importlib.util
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.selection import EXHAUSTIVE
from tests.server.live import Live, total
from tests.server.reach.routers import started_sglang_router

pytestmark = [
    EXHAUSTIVE,
    pytest.mark.skipif(
        not importlib.util.find_spec("sglang_router"), reason="sglang-router is not installed"
    ),
]

KEY = "given"
TEXT = "class Stack:\n    def "
LONG = "".join(f"def f{i}(x):\n    return x * {i}\n\n\n" for i in range(60))
MOST_QUEUED = 8
ENDLESS = {"model": "tiny", "prompt": TEXT, "max_tokens": 4000, "stream": True}
CHECKED = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1")


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Live]]:
    with ExitStack() as stack:
        own = ("--api-key", KEY, "--max-queued", str(MOST_QUEUED))
        yield [stack.enter_context(Live(*own)) for _ in range(2)]


@pytest.fixture(scope="module")
def routed(replicas: list[Live]) -> Iterator[openai.OpenAI]:
    urls = [replica.url for replica in replicas]
    with (
        started_sglang_router("--worker-urls", *urls, "--policy", "cache_aware", *CHECKED) as url,
        client(url) as own,
    ):
        yield own


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60.0)


def stream(own: openai.OpenAI, **fields: Any) -> Any:
    """Start a long stream."""
    asked: Any = {**ENDLESS, **fields}
    return own.completions.create(**asked, extra_body={"ignore_eos": True})


def idles(replicas: list[Live]) -> bool:
    """Wait until no request runs; return False on timeout."""
    for _ in range(600):
        if not any(total(replica.metrics(), "vllm:num_requests_running") for replica in replicas):
            return True
        time.sleep(0.05)
    return False


def test_texts_are_those_of_a_replica(replicas: list[Live], routed: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 24, "temperature": 0.0}
    alone = replicas[0].ask("/v1/completions", fields, Authorization=f"Bearer {KEY}").json["choices"][0]
    whole = routed.completions.create(**fields)
    parts = [*routed.completions.create(**fields, stream=True)]
    assert whole.choices[0].text == "".join(part.choices[0].text for part in parts) == alone["text"]
    assert len(parts) > 3
    messages: Any = [{"role": "user", "content": TEXT}]
    chat = routed.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    assert chat.usage and chat.usage.completion_tokens == 8


def test_keys_and_errors_pass_through(routed: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError, match="key"):
        routed.with_options(api_key="other").completions.create(model="tiny", prompt="x")
    with pytest.raises(openai.NotFoundError, match="not served"):
        routed.completions.create(model="huge", prompt="x")
    with pytest.raises(openai.BadRequestError, match="top_p"):
        routed.completions.create(model="tiny", prompt="x", top_p=7.0)


def test_a_prefix_goes_where_it_is_cached(routed: openai.OpenAI) -> None:
    for i in range(5):
        ended = routed.completions.create(model="tiny", prompt=LONG + "# more\n" * i, max_tokens=2)
        assert ended.usage and ended.usage.prompt_tokens_details
        cached = ended.usage.prompt_tokens_details.cached_tokens or 0
        assert (cached > 100) == (i > 0), "each prompt begins with the one before it"


def test_a_client_that_hangs_up_frees_its_replica(replicas: list[Live], routed: openai.OpenAI) -> None:
    own = stream(routed)
    next(iter(own))
    assert sum(total(replica.metrics(), "vllm:num_requests_running") for replica in replicas) == 1
    own.close()
    assert idles(replicas)


def test_a_refusal_is_passed_on(replicas: list[Live], routed: openai.OpenAI) -> None:
    with ExitStack() as stack:
        for replica in replicas:
            full = stack.enter_context(stream(stack.enter_context(client(replica.url)), n=MOST_QUEUED))
            next(iter(full))
        with pytest.raises(openai.RateLimitError, match="choices of tiny are in flight"):
            routed.completions.create(model="tiny", prompt=TEXT)
    assert idles(replicas)
    assert routed.completions.create(model="tiny", prompt=TEXT, max_tokens=4).choices


def test_replicas_that_are_killed_take_no_more(replicas: list[Live], routed: openai.OpenAI) -> None:
    """Must be the last test, because it kills the servers."""
    own = iter(stream(routed))
    next(own)
    for replica in replicas:
        replica.process.kill()
    with pytest.raises(openai.APIConnectionError):
        list(own)
    for _ in range(60):
        with pytest.raises(openai.APIStatusError) as error:
            routed.completions.create(model="tiny", prompt=TEXT, max_tokens=4)
        if error.value.status_code == 503:
            return
        time.sleep(0.5)
    raise AssertionError(error.value)
