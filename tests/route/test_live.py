"""Real servers behind a router, each in a separate process, called by the official client."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import openai
import pytest

from tests.route.live_router import LiveRouter
from tests.selection import EXHAUSTIVE
from tests.server.live import Live, total

pytestmark = EXHAUSTIVE

KEY = "given"
TEXT = "class Stack:\n    def "
LONG = "".join(f"def f{i}(x):\n    return x * {i}\n\n\n" for i in range(60))


@contextmanager
def house(count: int, *options: str) -> Iterator[tuple[LiveRouter, list[Live]]]:
    with ExitStack() as stack:
        replicas = [stack.enter_context(Live("--api-key", KEY, *options)) for _ in range(count)]
        router = stack.enter_context(LiveRouter("--replicas", ",".join(own.url for own in replicas), key=KEY))
        router.wait(count)
        yield router, replicas


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LiveRouter, list[Live]]]:
    with house(2) as found:
        yield found


@pytest.fixture(scope="module")
def router(pair: tuple[LiveRouter, list[Live]]) -> LiveRouter:
    return pair[0]


@pytest.fixture(scope="module")
def client(router: LiveRouter) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key=KEY, max_retries=0) as own:
        yield own


def test_texts_are_those_of_a_replica(pair: tuple[LiveRouter, list[Live]], client: openai.OpenAI) -> None:
    fields = {"model": "tiny", "prompt": TEXT, "max_tokens": 24, "temperature": 0.0}
    alone = (
        pair[1][0].ask("/v1/completions", fields, Authorization=f"Bearer {KEY}").json["choices"][0]["text"]
    )
    whole = client.completions.create(**fields)  # type: ignore[call-overload]
    parts = client.completions.create(**fields, stream=True)  # type: ignore[call-overload]
    assert whole.choices[0].text == "".join(part.choices[0].text for part in parts) == alone
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": TEXT}], max_completion_tokens=8
    )
    assert chat.usage and chat.usage.completion_tokens == 8
    assert [card.id for card in client.models.list()] == ["tiny"]


def test_keys_are_the_replicas(router: LiveRouter, client: openai.OpenAI) -> None:
    assert router.ask("/v1/completions", {"prompt": "x"}).status == 401
    assert router.ask("/v1/models").status == 401
    with pytest.raises(openai.AuthenticationError, match="key"):
        client.with_options(api_key="other").completions.create(model="tiny", prompt="x")
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.completions.create(model="huge", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="x", max_tokens=-1)


def test_a_client_that_hangs_up_frees_its_replica(
    pair: tuple[LiveRouter, list[Live]], client: openai.OpenAI
) -> None:
    router, replicas = pair
    stream = client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert sum(total(own.metrics(), "vllm:num_requests_running") for own in replicas) == 1
    stream.close()
    for _ in range(200):
        if not sum(total(own.metrics(), "vllm:num_requests_running") for own in replicas):
            break
        time.sleep(0.05)
    reasons = [own.metrics() for own in replicas]
    aborted = [
        value
        for each in reasons
        for name, value in each.items()
        if re.search(r'success_total.*"abort"', name)
    ]
    assert sum(aborted) == 1
    assert total(router.metrics(), "specdec:route_replica_under_way") == 0


def test_a_prefix_goes_where_it_was_read(pair: tuple[LiveRouter, list[Live]], client: openai.OpenAI) -> None:
    for i in range(5):
        ended = client.completions.create(model="tiny", prompt=LONG + "# more\n" * i, max_tokens=2)
        assert ended.usage and ended.usage.prompt_tokens_details
        cached = ended.usage.prompt_tokens_details.cached_tokens or 0
        assert (cached > 100) == (i > 0), "each prompt begins with the one before it"


def test_stored_responses_are_found_again(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input=TEXT, max_output_tokens=16)
    for _ in range(4):
        assert client.responses.retrieve(first.id).id == first.id
        own = client.responses.create(
            model="tiny", input="x", previous_response_id=first.id, max_output_tokens=16
        )
        assert own.previous_response_id == first.id


def test_a_replica_that_is_killed_ends_its_streams_and_takes_no_more() -> None:
    with house(2) as (router, replicas):
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key=KEY, max_retries=0) as client:
            stream = client.completions.create(
                model="tiny", prompt=TEXT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            )
            parts = iter(stream)
            next(parts)
            (busy,) = [own for own in replicas if total(own.metrics(), "vllm:num_requests_running")]
            (other,) = [own for own in replicas if own is not busy]
            steps = total(other.metrics(), "specdec:step_tokens_total")
            busy.process.send_signal(signal.SIGKILL)
            with pytest.raises(openai.APIConnectionError):
                list(parts)
            assert total(other.metrics(), "specdec:step_tokens_total") == steps, "nothing was asked again"
            for _ in range(3):
                got = client.completions.create(model="tiny", prompt=TEXT, max_tokens=4)
                assert got.usage and got.usage.completion_tokens == 4
            router.wait(1)
        code, said = router.stop()
        assert code == 0 and "is down" in said and "Traceback" not in said


def test_what_is_wrong_is_one_line() -> None:
    command = [sys.executable, "-m", "specdec.cli", "route", "--replicas", "here"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("specdec: --replicas: 'here' is no replica's address")


def test_the_router_needs_no_torch() -> None:
    code = "import sys, specdec.route.run, specdec.route.command; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "False\n", ended.stderr
