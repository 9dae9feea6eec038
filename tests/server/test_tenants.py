"""With two keys, neither can learn the other's outputs; on a server that shares them the attack succeeds."""

import pytest

from tests.selection import EXHAUSTIVE, only
from tests.server.attack import FIXED, KEYS, SECRETS, attack
from tests.server.live import Live


@EXHAUSTIVE
@pytest.mark.parametrize("draft", only({"suffix"}, ["suffix", "auto"]))
def test_trees_and_counts_reveal_nothing_of_other_callers(draft: str) -> None:
    """With a head, experience decides what is verified: counts change with the caller's own traffic."""
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
    """The control: without isolation the attack works."""
    with Live("--draft", "suffix", *FIXED, *KEYS, entry="tests.server.sharing") as live:
        report = attack(live)
    assert not report.is_secure()
    assert min(report.read.values()) == len(SECRETS) and report.steady, (
        "without alice's writing bob sees no difference"
    )
    assert all(report.told.values()) and all(report.hit.values())
