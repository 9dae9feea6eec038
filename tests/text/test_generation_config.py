"""Defaults that a checkpoint's generation_config.json gives for requests."""

import json
from pathlib import Path

import pytest

from specdec.config.sampling import SamplingParams
from specdec.text.generation_config import sampling_defaults


def test_valid_sampling_parameters_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert sampling_defaults(tmp_path) == {}
    values = {
        "temperature": 0.6,
        "top_p": 7,
        "top_k": 20,
        "min_p": None,
        "do_sample": True,
        "eos_token_id": 2,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    assert "generation_config.json is ignored: SamplingParams.top_p" in caplog.text


def test_given_parameters_win() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    params = SamplingParams(temperature=1.0, max_tokens=5).with_defaults(defaults)
    assert params == SamplingParams(temperature=1.0, top_k=20, max_tokens=5)
