"""With two keys, one cannot read what the other's answers hold; where all is shared the same attack can."""

import pytest

from tests.selection import EXHAUSTIVE, only
from tests.server.attack import FIXED, KEYS, SECRETS, attack
from tests.server.live import Live


@EXHAUSTIVE
@pytest.mark.parametrize("draft", only({"suffix"}, ["suffix", "auto"]))
def test_trees_and_counts_tell_nothing_of_anothers_answers(draft: str) -> None:
    """Where a head drafts too, experience decides what is verified: counts move with one's own traffic."""
    with Live("--draft", draft, *FIXED, *KEYS) as live:
        report = attack(live)
        code, said = live.stop()
    assert code == 0 and "alice" not in said and "Traceback" not in said, "no key is logged"
    own = report.read.pop("alice")
    assert own == len(SECRETS) if draft == "suffix" else own > 0
    assert report.read == {"bob": 0, "bob, salted": 0, "alice, salted": 0}
    if draft == "suffix":
        kept_apart = {"bob": False, "bob, salted": False, "alice, salted": False, "alice": True}
        assert report.steady and report.told == report.hit == kept_apart


@EXHAUSTIVE
def test_the_same_attack_on_a_server_that_shares_all_succeeds() -> None:
    """The control: what the test above rests on is that this can be read."""
    with Live("--draft", "suffix", *FIXED, *KEYS, entry="tests.server.sharing") as live:
        report = attack(live)
    assert not report.is_secure()
    assert set(report.read.values()) == {len(SECRETS)} and report.steady, (
        "without alice's writing bob sees no difference"
    )
    assert all(report.told.values()) and all(report.hit.values())
