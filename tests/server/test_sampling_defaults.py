"""Requests take what they leave out from the model's generation_config.json, as in vLLM and SGLang."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec.models.folder import SHIPPED
from tests.server.live import Live

GREEDY = {"temperature": 0.0}
CHAT = [{"role": "user", "content": "def"}]


def texts(live: Live, **given: Any) -> tuple[str, str]:
    shared = {"max_tokens": 12, "seed": 3, **given}
    completed = live.ask("/v1/completions", {"prompt": "def", **shared}).json["choices"][0]["text"]
    chatted = live.ask("/v1/chat/completions", {"messages": CHAT, **shared}).json["choices"][0]["message"]
    return completed, chatted["content"]


@pytest.mark.parametrize("source", ["model", "openai"])
def test_the_model_or_openai_gives_the_defaults(source: str, tmp_path: Path) -> None:
    folder = shutil.copytree(SHIPPED["tiny"], tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({**GREEDY, "top_k": 1}))
    with Live("--sampling-defaults", source, model=str(folder)) as live:
        greedy, sampled, left_out = texts(live, **GREEDY), texts(live, temperature=1.0, top_k=0), texts(live)
        defaults = live.ask("/server_info").json["sampling_defaults"]
    assert greedy != sampled
    assert (left_out, defaults) == ((greedy, {**GREEDY, "top_k": 1}) if source == "model" else (sampled, {}))
