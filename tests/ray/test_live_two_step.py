"""A prefill and a decode instance placed by a real Ray: prompts are transferred, or prefilled by decode."""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.ray.live import LiveRay, needs_ray
from tests.selection import EXHAUSTIVE
from tests.server.live import Live
from tests.server.reach.pairs import EXACT, free_port, has_nixl

pytestmark = [needs_ray, has_nixl, EXHAUSTIVE]

TEXT = "".join(f"class Parser{i}:\n    def parse(self, text):\n        return text\n" for i in range(24))
OPTIONS = ("--prefill", "1", "--decode", "1", "--stats-period", "3600")
"""No health check ends a replica whose process was killed."""
FETCHED = re.compile(r'specdec:reach_fetches_total\{.*outcome="fetched"')


@pytest.fixture(scope="module")
def live() -> Iterator[LiveRay]:
    with LiveRay(*OPTIONS, *EXACT, "--reach-port", str(free_port())) as own:
        yield own


@pytest.fixture(scope="module")
def alone() -> Iterator[openai.OpenAI]:
    with Live(*EXACT) as own, client(own.url) as called:
        yield called


@pytest.fixture(scope="module")
def routed(live: LiveRay) -> Iterator[openai.OpenAI]:
    with client(live.url) as own:
        yield own


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60.0)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read(), "utf-8")


def processes(live: LiveRay) -> dict[str, int]:
    """Return process ids by role."""
    return {json.loads(read(f"{url}/server_info"))["role"]: pid for pid, url in live.wait(2).items()}


def fetched(live: LiveRay) -> float:
    """Count the prompts that any instance fetched."""
    lines = "".join(read(f"{url}/metrics") for url in live.replicas().values()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if FETCHED.match(line))


def asked(prompt: str, **own: Any) -> dict[str, Any]:
    extra = {"ignore_eos": True}
    return {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "extra_body": extra, **own}


def test_prompts_are_fetched_and_texts_are_those_of_one_server(
    live: LiveRay, alone: openai.OpenAI, routed: openai.OpenAI
) -> None:
    before = fetched(live)
    for i, own in enumerate(({}, {"temperature": 0.8, "seed": 7})):
        body = asked(f"# {i}\n{TEXT}", **own)
        answer, expected = routed.completions.create(**body), alone.completions.create(**body)
        assert answer.choices[0].text == expected.choices[0].text
        assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1
    assert fetched(live) == before + 2


def test_streams_and_the_next_turn(live: LiveRay, alone: openai.OpenAI, routed: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": f"# chat\n{TEXT}"}]
    before = fetched(live)
    for _ in range(2):
        body: Any = {"model": "tiny", "messages": turns, "max_tokens": 16, "temperature": 0}
        parts = routed.chat.completions.create(**body, stream=True)
        said = "".join(part.choices[0].delta.content or "" for part in parts)
        assert said == alone.chat.completions.create(**body).choices[0].message.content
        turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    assert fetched(live) == before + 1, "decode has the first turn"


def test_decode_prefills_once_the_prefill_instance_is_gone(
    live: LiveRay, alone: openai.OpenAI, routed: openai.OpenAI
) -> None:
    """Must be the last test, because it kills the prefill instance."""
    before = fetched(live)
    os.kill(processes(live)["prefill"], signal.SIGKILL)
    live.wait(1)
    body = asked(f"# gone\n{TEXT}")
    answer, expected = routed.completions.create(**body), alone.completions.create(**body)
    assert answer.choices[0].text == expected.choices[0].text
    assert answer.usage.prompt_tokens_details.cached_tokens == 0 and fetched(live) == before
