"""Drafts change no text on a GPU: the cells of the capability table, in float32."""

import itertools
from collections.abc import Callable

import pytest

from specdec.setup.capabilities import AXES
from tests.lossless.cells import Family
from tests.models.random_checkpoints import HEADS
from tests.tolerances import EXCUSED_TEXTS, TENSOR_CORE_GAP

pytestmark = pytest.mark.gpu

CELLS = [
    pytest.param(*cell, id="-".join(cell))
    for cell in itertools.product(
        AXES["family"],
        ("mtp", "eagle", "block", "ngram", "suffix", "auto", "oracle"),
        AXES["shape"],
        AXES["backing"],
    )
    if cell[1] != "mtp" or cell[0] in HEADS
]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Return a function that writes a family's model once, and returns it."""
    made: dict[str, Family] = {}

    def make(name: str) -> Family:
        if name not in made:
            made[name] = Family(tmp_path_factory.mktemp(name), name, device="cuda", kernels="triton")
        return made[name]

    return make


@pytest.mark.parametrize(("name", "drafter", "shape", "backing"), CELLS)
def test_drafts_change_no_text(
    family: Callable[[str], Family], name: str, drafter: str, shape: str, backing: str
) -> None:
    """A text may diverge only where two tokens nearly tie, and few texts may."""
    own = family(name)
    before = own.texts
    found = list(own.partings(drafter, shape, backing))
    assert [parting for parting in found if not parting.gap < TENSOR_CORE_GAP] == []
    assert len(found) <= 1 + EXCUSED_TEXTS * (own.texts - before)
