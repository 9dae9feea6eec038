"""Unread config fields are named once, without those that transformers writes."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.config.engine import EngineConfig
from specdec.models.families import unread_fields
from specdec.models.shapes import SHAPES
from specdec.setup.resolve import open_model
from tests.models.drawn import DRAWN
from tests.models.random_checkpoints import FAMILIES, draw, edit_config


@pytest.mark.parametrize("family", [*FAMILIES, *DRAWN])
def test_all_fields_that_transformers_writes_are_known(family: str) -> None:
    """Covers all fields of its configs; a file may have fewer."""
    assert [unread_fields(draw(family, seed).config.to_dict()) for seed in range(12)] == [[]] * 12


@pytest.mark.parametrize("shape", SHAPES)
def test_unread_fields_are_named(shape: str) -> None:
    own = {**SHAPES[shape], "residual_gamma": 2.0, "sandwich": {"on": True}, "scale_by": None, "soft": False}
    assert unread_fields(SHAPES[shape]) == []
    assert unread_fields(own) == ["residual_gamma", "sandwich"]
    kind, is_inner, _ = own["model_type"].partition("_text")
    if is_inner:
        outer = {"model_type": kind, "text_config": own, "vision_config": {"depth": 3}}
        assert unread_fields(outer) == ["residual_gamma", "sandwich"]


def test_a_model_with_an_unknown_field_is_loaded_with_one_warning(
    checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint(), tmp_path / "own"))
    config = EngineConfig(device="cpu", memory_bytes=1 << 26, draft="none")
    with caplog.at_level(logging.WARNING):
        open_model(folder, config)
        assert caplog.records == []
        edit_config(folder, residual_gamma=2.0)
        open_model(folder, config)
    (record,) = caplog.records
    assert "residual_gamma" in record.getMessage() and "2.0" not in record.getMessage()
