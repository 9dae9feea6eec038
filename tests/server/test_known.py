"""The playground's Send and Compare: reused outputs are reported, and a fresh salt finds none."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.attack import FIXED
from tests.server.live import Live, serving


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    yield from serving("--draft", "suffix", "--topk", "1", *FIXED)


def usage(live: Live, **own: Any) -> tuple[int, int, int]:
    """Return the accepted tokens, those from earlier outputs, and the prompt's cached tokens."""
    body = {
        "prompt": "class Parser:\n" * 8 + "    def ",
        "max_tokens": 64,
        "temperature": 0,
        "ignore_eos": True,
    }
    told = live.ask("/v1/completions", {**body, **own}).json["usage"]
    details = told["completion_tokens_details"]
    accepted, known = details["accepted_prediction_tokens"], details["accepted_from_outputs"]
    return accepted, known, told["prompt_tokens_details"]["cached_tokens"]


def test_a_fresh_salt_hits_no_earlier_prefix(live: Live) -> None:
    first = usage(live)
    assert first[1:] == (0, 0)
    usage(live)
    _, known, cached = usage(live)
    assert known > 32 and cached > 0, "the control: without a salt both are found"
    for speculate in (True, False):
        accepted, *found = usage(live, speculate=speculate, cache_salt=f"compared {speculate}")
        assert found == [0, 0] and accepted == (first[0] if speculate else 0)


def test_the_server_reports_which_drafts_run_and_why(live: Live) -> None:
    told = live.ask("/server_info").json["speculation"]
    assert told["name"] == "a chain of 6" and told["reason"].endswith("adaptive is off")
    assert told["expected_tokens"] is told["cost"] is None


def test_all_choices_are_counted(live: Live) -> None:
    drawn = {"cache_salt": "choices", "n": 2, "temperature": 0.8, "seed": 3}
    usage(live, **drawn)
    accepted, known, _ = usage(live, **drawn)
    assert 64 < known <= accepted, "more than one choice has"
