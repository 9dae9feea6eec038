"""Every field of transformers' config classes away from its default: equal logits, or a refusal by name."""

from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from specdec.errors import CheckpointError
from specdec.models import families
from tests.models.option_values import BASES, FULL, OWN, SLIDING, Option, as_file, declared, options
from tests.models.random_checkpoints import Sample, save
from tests.models.runner import Runner
from tests.models.test_network import relative
from tests.tolerances import LOGITS_RELATIVE

KNOWN = [family for family in OWN if family in CONFIG_MAPPING]
"""Families that this release of transformers has."""
FIELDS = [(family, name) for family in KNOWN for name in declared(family)]
EACH = [(family, name, one) for family, name in FIELDS for one in options(family, name)]
TOKENS = 23
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"head_dim": 12},
    {"rope_parameters": None, "rope_theta": 1e6},
    {"rope_parameters": None, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    {"rope_parameters": None, "partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 0.5},
    {"rope_theta": 3e6},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e6},
    {"rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "rope_theta": 3e6},
    {"rope_parameters": {}},
    {"rope_scaling": {}},
    {"rope_scaling": {"type": "default", "rope_theta": 3e6}},
    {"rope_scaling": {"rope_type": "default"}, "rope_theta": 3e6},
    {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3e6}}},
    {"rope_parameters": {kind: {"type": "yarn", "rope_theta": 3e6} for kind in (FULL, SLIDING)}},
)
"""Changes of a file that correspond to no single field of a class."""
DEFAULTS_APART = {"eos_token_id", "num_key_value_heads"}
"""Fields whose absence is not compared. Files here name no end tokens: `generation_config.json` does. In
latent attention every head has a key; other families refuse a file without the number.
"""
CRASHES = {"output_router_logits"}
"""Fields that make transformers fail in combination, for example because no experts remain."""


def built(family: str, changes: dict[str, Any]) -> transformers.PreTrainedConfig:
    return type(BASES[family]())(**deepcopy(declared(family) | changes))  # transformers mutates its arguments


def gap(family: str, config: transformers.PreTrainedConfig, folder: Path) -> float:
    sample = Sample(family, 5, config, False, fused=True, sharded=False, multimodal=False)
    model, rng = save(sample, folder), Random(3)
    tokens = [rng.randrange(config.vocab_size) for _ in range(TOKENS)]
    with torch.inference_mode():
        expected_TV = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return relative(Runner(folder, torch.float32).read(tokens, 7), expected_TV)


def test_every_field_of_a_config_has_a_value_to_try() -> None:
    assert [own for own in FIELDS if not options(*own)] == []


@pytest.mark.parametrize("family", KNOWN)
def test_config_fields_mean_what_transformers_reads(family: str) -> None:
    """Each field absent, null, or in an older layout; files that either side refuses are not compared."""
    base, compared = as_file(family), 0
    absent = [{key: value for key, value in base.items() if key != name} for name in base]
    changed = [base | change for change in ({name: None} for name in base)]
    for file in (*absent, *changed, *(base | change for change in LAYOUTS)):
        try:
            config = type(BASES[family]())(**deepcopy(file))
            found = families.network(file)
        except (StrictDataclassError, CheckpointError, ValueError, TypeError, KeyError, AttributeError):
            continue
        if (missing := base.keys() - file.keys()) and missing <= DEFAULTS_APART:
            continue
        compared += 1
        difference = {name: file.get(name) for name in {*base, *file} if file.get(name) != base.get(name)}
        assert found == families.network(config.to_dict()), difference
    assert compared > 20


def away(family: str, rng: Random) -> dict[str, Any]:
    """Change fields in random order, each if compatible with the changes before it."""
    changes: dict[str, Any] = {}
    for name in rng.sample(list(declared(family)), len(declared(family))):
        one = rng.choice(options(family, name))
        more = {name: one.value, **one.beside}
        if one.refused or name in {*changes, *CRASHES} or more.keys() & changes.keys():
            continue
        try:
            families.network(built(family, changes | more).to_dict())
        except (StrictDataclassError, CheckpointError, ValueError, ZeroDivisionError):
            continue
        changes |= more
    return changes


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        pytest.param(family, seed, marks=pytest.mark.exhaustive if seed else ())
        for family in KNOWN
        for seed in range(6)
    ],
)
def test_all_fields_together_equal_transformers(family: str, seed: int, tmp_path: Path) -> None:
    changes = away(family, Random(f"{family} {seed}"))
    assert len(changes) > len(declared(family)) / 2
    assert gap(family, built(family, changes), tmp_path) < LOGITS_RELATIVE, changes


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "name", "option"), EACH, ids=lambda own: str(getattr(own, "value", own)))
def test_each_field_equals_transformers(family: str, name: str, option: Option, tmp_path: Path) -> None:
    config = built(family, {name: option.value, **option.beside})
    if option.refused:
        with pytest.raises(CheckpointError) as error:
            families.network(config.to_dict())
        assert error.value.field is not None and error.value.field.split(".")[0] == name
    else:
        assert gap(family, config, tmp_path) < LOGITS_RELATIVE
