"""The table of supported combinations: it is printed, correct, and the source of refusals."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from specdec import EngineConfig, SamplingParams, SpecEngine
from specdec.config.drafters import DRAFTER_OPTIONS
from specdec.errors import ConfigError, RequestError
from specdec.models.families import TITLES, family_of, supported
from specdec.setup.capabilities import AXES, Cell, cells, refusal
from specdec.setup.drafters import DRAFTERS, NO_HEAD
from tests.lossless.cases import FEATURES, SHAPES
from tests.models.agreeing import CONFIGS

FAMILIES = Path(__file__).parents[2] / "docs/families.md"


def test_the_documents_name_every_family_and_model_type() -> None:
    named = set(re.findall("`(.*?)`", FAMILIES.read_text("utf-8")))
    assert {*TITLES, *supported()} - named - {f"{kind}_text" for kind in named} == set()


def test_the_axes_are_what_there_is() -> None:
    assert set(AXES["drafter"]) == {"auto", "none", *DRAFTERS} and [*DRAFTERS] == [*DRAFTER_OPTIONS]
    assert set(AXES["backing"]) == set(get_args(EngineConfig.model_fields["slots"].annotation))
    assert set(AXES["family"]) == set(CONFIGS)
    # Several published model types may map to one family.
    served, listed = (
        {family_of({"model_type": kind}).NAME for kind in kinds} for kinds in (supported(), CONFIGS)
    )
    assert served == listed
    assert set(AXES["prefixes"]) == {"read", "kept"} and "prefix_cache" in EngineConfig.model_fields
    assert set(AXES["sampling"]) == set(FEATURES) and set(AXES["shape"]) == set(SHAPES)


@pytest.mark.parametrize("drafter", AXES["drafter"])
def test_a_row_of_the_table_hides_nothing(drafter: str) -> None:
    """A drafter supports the full product of the values its row lists: no cell of it is refused."""
    found = {cell for cell in cells() if cell.drafter == drafter and not refusal(cell)}
    held = [[v for v in AXES[axis] if any(getattr(cell, axis) == v for cell in found)] for axis in AXES]
    assert found == set(itertools.starmap(Cell, itertools.product(*held)))


@pytest.fixture(scope="module")
def folders(family_folder: Callable[..., Path]) -> dict[str, Path]:
    return {family: family_folder(family) for family in CONFIGS}


def test_every_unsupported_cell_is_refused_with_the_tables_message(folders: dict[str, Path]) -> None:
    refused = {
        (c.family, c.drafter, c.shape, c.backing, c.steps): why for c in cells() if (why := refusal(c))
    }
    assert len(refused) > 20
    for (family, drafter, shape, backing, steps), why in refused.items():
        fields = {"topk": SHAPES[shape]["topk"], "graphs": steps == "device"}
        with pytest.raises(ConfigError) as caught:
            SpecEngine(folders[family], draft=drafter, slots=backing, **fields)
        assert caught.value.field == why.field
        assert str(caught.value) == str(why)


def test_a_checkpoint_without_a_head_is_refused_the_same_way(hybrid: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        SpecEngine(hybrid, draft="mtp")
    assert str(caught.value) == str(NO_HEAD)


def test_log_probabilities_of_synthetic_drafts_are_refused(folders: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with SpecEngine(folders["qwen3_5"], draft="mtp", num_steps=3, synthetic_acceptance=2.5) as engine:
        with pytest.raises(RequestError) as caught:
            engine.generate([1, 2], params.model_copy(update={"logprobs": 0}))
        assert caught.value.field == "logprobs"
        assert engine.generate([1, 2], params)[0].stats.synthetic
    with SpecEngine(folders["qwen3_5"], draft="mtp") as engine:
        assert not engine.generate([1, 2], params)[0].stats.synthetic
