"""Whatever a client claims about a lent prompt, it gets its own prompt's text, or an error."""

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.bench.random_model import write_random_checkpoint
from tests.selection import EXHAUSTIVE
from tests.server.live import Answer, Live
from tests.server.reach.forgery import (
    FORGERIES,
    KEYS,
    SMALL,
    TOKENS,
    VOCAB,
    Fuzz,
    opened,
    outcomes,
    question,
    settled,
)
from tests.server.reach.pairs import has_nixl
from tests.server.reach.routers import Pair, authorized

BODIES = 800
"""`python -m tests.server.reach.forgery` sends 10,000."""

pytestmark = has_nixl


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_random_checkpoint(folder, SMALL, seed=0)
    return folder


@pytest.fixture(scope="module")
def pair(small: Path) -> Iterator[Pair]:
    with opened(small) as pair:
        yield pair


@EXHAUSTIVE
def test_forged_params_never_yield_another_prompts_text(pair: Pair) -> None:
    report = asyncio.run(Fuzz(pair, 0).run(BODIES, at_once=6))
    assert report.wrong == []
    assert report.sent.keys() == {*FORGERIES, "good"}
    # Not every forgery was rejected before anything could be stolen.
    found = outcomes(pair)
    assert all(found[own] > 0 for own in ("fetched", "bad_mac", "not_allowed", "no_lease")), found
    assert settled(pair) == {}


@EXHAUSTIVE
def test_a_pair_without_signature_checks_is_detected(small: Path) -> None:
    with opened(small, entry="tests.server.reach.gullible") as pair:
        reports = (asyncio.run(Fuzz(pair, seed).run(240, at_once=4)) for seed in range(1, 6))
        wrong = (line for report in reports for line in report.wrong if "instead of" in line)
        # Which requests overlap depends on the load: it may take several rounds.
        assert any(line.startswith(("swapped", "other_prompt", "stale")) for line in wrong)


def prompts(count: int, seed: int) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(10, VOCAB) for _ in range(TOKENS)] for _ in range(count)]


def ask(live: Live, prompt: list[int], salt: str, pair: Pair | None = None, room: int = 0) -> Answer:
    """Send a prompt, with SGLang's fields if a pair is given."""
    place = (
        {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.port, "bootstrap_room": room} if pair else {}
    )
    return live.ask("/v1/completions", question([prompt], salt) | place, **authorized(KEYS[0]))


def ids(answer: Answer) -> list[int]:
    assert answer.status == 200, answer.data
    found: list[int] = answer.json["choices"][0]["token_ids"]
    return found


@EXHAUSTIVE
def test_a_room_never_serves_another_prompt(pair: Pair) -> None:
    asked = prompts(6, seed=2)
    own = [ids(ask(pair.decode, prompt, "alone")) for prompt in asked]
    assert len({*map(tuple, own)}) == len(own)
    for place, (prompt, other) in enumerate(zip(asked, [*asked[1:], asked[0]], strict=True)):
        salt, room = f"room-{place}", (1 << 62) + place
        assert ask(pair.prefill, prompt, salt, pair, room).status == 200
        # Another prompt, the same one under another salt, the right one, and the right one again.
        assert ids(ask(pair.decode, other, salt, pair, room)) == own[(place + 1) % len(own)]
        assert ids(ask(pair.decode, prompt, f"{salt}-other", pair, room)) == own[place]
        fetched = ask(pair.decode, prompt, salt, pair, room)
        assert ids(fetched) == own[place]
        assert ids(ask(pair.decode, prompt, f"{salt}-again", pair, room)) == own[place]
    assert settled(pair) == {}


@EXHAUSTIVE
def test_two_requests_for_one_room_both_get_their_text(pair: Pair) -> None:
    """Two requests share a room, on either side: one is fetched or refused, none gets the other's text."""
    first, second = prompts(2, seed=3)
    own = [ids(ask(pair.decode, prompt, "alone-too")) for prompt in (first, second)]
    lent: list[int] = []
    room = (1 << 62) + 99

    def lend(prompt: list[int]) -> None:
        lent.append(ask(pair.prefill, prompt, "one-room", pair, room).status)

    threads = [threading.Thread(target=lend, args=(prompt,)) for prompt in (first, second)]
    for thread in threads:
        thread.start()
    answers = [ask(pair.decode, prompt, "one-room", pair, room) for prompt in (first, second)]
    for thread in threads:
        thread.join()
    assert sorted(lent) in ([200, 200], [200, 409])
    assert [ids(answer) for answer in answers] == own
    assert settled(pair) == {}
