"""Defaults for requests from a checkpoint's `generation_config.json`."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.config.sampling import SamplingParams
from specdec.errors import ConfigError
from specdec.text.chat_template import read_json

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The parameters that vLLM and SGLang take from there."""


def longest_answer(folder: Path) -> int | None:
    """Return `max_new_tokens`, if set."""
    max_new_tokens = read_json(folder / FILE).get("max_new_tokens")
    return (
        max_new_tokens if type(max_new_tokens) is int and max_new_tokens > 0 else None
    )  # `true` is an int too


def sampling_defaults(folder: Path) -> Mapping[str, Any]:
    """Return the sampling parameters that a checkpoint recommends, without invalid ones, which are logged."""
    values = read_json(folder / FILE)
    defaults: dict[str, Any] = {}
    for name in SAMPLING:
        if values.get(name) is None:
            continue
        try:
            defaults[name] = getattr(SamplingParams.model_validate({name: values[name]}), name)
        except ConfigError as error:
            logger.warning("%s is ignored: %s", FILE, error)
    return defaults
