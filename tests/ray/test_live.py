"""Two replicas placed by a real Ray, called by the official client through the ingress."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.ray.live import LiveRay, needs_ray
from tests.selection import EXHAUSTIVE
from tests.server.live import STOP_S, total

pytestmark = [needs_ray, EXHAUSTIVE]

KEY = "given"
TEXT = "class Stack:\n    def "
LONG = "".join(f"def f{i}(x):\n    return x * {i}\n\n\n" for i in range(60))
MOST_QUEUED = 8


@pytest.fixture(scope="module")
def live() -> Iterator[LiveRay]:
    with LiveRay("--num-replicas", "2", "--api-key", KEY, "--max-queued", str(MOST_QUEUED)) as own:
        yield own


@pytest.fixture(scope="module")
def client(live: LiveRay) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as own:
        yield own


def figure(url: str, name: str) -> float:
    """Sum one metric of a replica's process."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return total(
        {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}, name
    )


def running(live: LiveRay) -> float:
    return sum(figure(url, "vllm:num_requests_running") for url in live.replicas().values())


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(1200):
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError


def long_stream(client: openai.OpenAI, start: str) -> "openai.Stream[openai.types.Completion]":
    return client.completions.create(
        model="tiny", prompt=start, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )


def test_texts_are_those_of_a_replica(live: LiveRay, client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=TEXT, max_tokens=24, temperature=0.0)
    parts = client.completions.create(model="tiny", prompt=TEXT, max_tokens=24, temperature=0.0, stream=True)
    sent = json.dumps({"prompt": TEXT, "max_tokens": 24, "temperature": 0}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for url in live.wait(2).values():
        request = urllib.request.Request(f"{url}/v1/completions", sent, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            alone = json.load(answer)["choices"][0]["text"]
        assert alone == whole.choices[0].text
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [card.id for card in client.models.list()] == ["tiny"]


def test_headers_keys_and_errors_pass_through(live: LiveRay, client: openai.OpenAI) -> None:
    answer = live.ask("/v1/models", Authorization=f"Bearer {KEY}", X_Request_ID="mine")
    assert answer.status == 200 and answer.headers["x-request-id"] == "mine"
    assert live.ask("/v1/completions", {"prompt": "x"}).status == 401
    with pytest.raises(openai.AuthenticationError, match="key"):
        client.with_options(api_key="other").completions.create(model="tiny", prompt="x")
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.completions.create(model="huge", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="x", max_tokens=-1)


def test_a_prefix_goes_where_it_is_cached(client: openai.OpenAI) -> None:
    for i in range(6):
        parts = client.completions.create(
            model="tiny",
            prompt=LONG + "# more\n" * i,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = [part.usage for part in parts if part.usage][-1]
        assert usage.prompt_tokens_details
        assert ((usage.prompt_tokens_details.cached_tokens or 0) > 100) == (i > 0)


def test_chats_and_stored_responses(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": TEXT}], max_completion_tokens=8
    )
    assert chat.usage and chat.usage.completion_tokens == 8
    first = client.responses.create(model="tiny", input=TEXT, max_output_tokens=16)
    for _ in range(4):
        assert client.responses.retrieve(first.id).id == first.id
        own = client.responses.create(
            model="tiny", input="x", previous_response_id=first.id, max_output_tokens=16
        )
        assert own.previous_response_id == first.id


def test_both_replicas_are_used_under_load(live: LiveRay, client: openai.OpenAI) -> None:
    before = {pid: figure(url, "vllm:request_success_total") for pid, url in live.wait(2).items()}

    def ask(i: int) -> str:
        parts = client.completions.create(model="tiny", prompt=f"{i} {TEXT}", max_tokens=16, stream=True)
        return [part.choices[0].finish_reason for part in parts][-1] or ""

    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(ask, range(24))} <= {"length", "stop"}
    for pid, url in live.replicas().items():
        assert figure(url, "vllm:request_success_total") > before[pid]


def test_a_client_that_hangs_up_frees_its_replica(live: LiveRay, client: openai.OpenAI) -> None:
    stream = long_stream(client, TEXT)
    next(iter(stream))
    assert running(live) == 1
    stream.close()
    until(lambda: running(live) == 0)


def test_a_refusal_of_all_replicas_is_passed_on(live: LiveRay, client: openai.OpenAI) -> None:
    def ask() -> int:
        body = {"prompt": TEXT, "n": MOST_QUEUED, "max_tokens": 400, "ignore_eos": True}
        return live.ask("/v1/completions", body, Authorization=f"Bearer {KEY}").status

    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(ask) for _ in range(2)]
        until(lambda: all(figure(url, "vllm:num_requests_running") for url in live.replicas().values()))
        with pytest.raises(openai.RateLimitError, match="choices of tiny are in flight"):
            client.completions.create(model="tiny", prompt=TEXT, n=2)
        assert [own.result() for own in busy] == [200, 200]


def test_a_replica_that_is_killed_loses_only_its_own_streams_and_comes_back(
    live: LiveRay, client: openai.OpenAI
) -> None:
    streams = [long_stream(client, f"{i} {TEXT}") for i in range(4)]
    for own in streams:
        next(iter(own))
    first, other = live.wait(2).items()
    counts = [figure(url, "vllm:num_requests_running") for _, url in (first, other)]
    assert sum(counts) == 4 and min(counts) > 0
    os.kill(first[0], signal.SIGKILL)

    def read(stream: "openai.Stream[openai.types.Completion]") -> str:
        try:
            return [part.choices[0].finish_reason for part in stream][-1] or ""
        except openai.APIError as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(4) as pool:
        ends = [*pool.map(read, streams)]
    lost = [end for end in ends if end != "length"]
    assert len(lost) == counts[0], "no other stream ends"
    # An event, as a connection that is closed would be another error.
    assert {*lost} == {"APIError: The replica was lost during its answer."}
    for i in range(4):
        assert client.completions.create(model="tiny", prompt=f"{i}", max_tokens=4).choices
    until(lambda: len(live.replicas()) == 2 and first[0] not in live.replicas())
    until(lambda: _used(live, client))


def _used(live: LiveRay, client: openai.OpenAI) -> bool:
    """Return whether all replicas have answered, after some more requests."""
    for i in range(4):
        client.completions.create(model="tiny", prompt=f"{time.monotonic()} {i}", max_tokens=1)
    return all(figure(url, "vllm:request_success_total") for url in live.replicas().values())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["nonesuch"], "nonesuch is neither a folder nor"),
        (["tiny", "--num-cpus", "512"], "--num-cpus: 1 replica of 512 needs 512 CPUs, and this machine has"),
        (["tiny", "--max-running", "0"], "--max-running cannot be 0"),
        (["tiny", "--role", "prefill"], "--role is not an option"),
    ],
)
def test_what_is_wrong_is_one_line(options: list[str], says: str) -> None:
    command = [sys.executable, "-m", "specdec.cli", "ray", "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and says in ended.stderr, ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_a_port_that_is_taken_is_named(live: LiveRay) -> None:
    port = live.url.rpartition(":")[2]
    command = [sys.executable, "-m", "specdec.cli", "ray", "tiny", "--port", port]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "port" in ended.stderr and port in ended.stderr


def test_requests_in_flight_end_before_the_shutdown(live: LiveRay, client: openai.OpenAI) -> None:
    processes = live.wait(2)
    parts = iter(long_stream(client, TEXT))
    next(parts)
    live.process.send_signal(signal.SIGTERM)
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    live.process.wait(timeout=STOP_S)  # a second signal would end it at once
    code, said = live.stop()
    assert code == 0 and "Traceback" not in said, said
    assert not any(os.path.exists(f"/proc/{pid}") for pid in processes), "nothing is left running"
