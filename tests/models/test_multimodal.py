"""The text models of multimodal checkpoints whose language model is one of our families."""

from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.models import families
from specdec.models.checkpoint import Checkpoint
from tests.models.random_checkpoints import draw
from tests.models.runner import Runner
from tests.models.test_drawn import relative
from tests.tolerances import LOGITS_RELATIVE

EYE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def minicpm(kind: str, text: dict[str, Any]) -> PreTrainedConfig:
    eye = {**EYE, "model_type": f"{kind}_vision"}
    return transformers.AutoConfig.for_model(kind, text_config=text, vision_config=eye, insert_layer_id=0)


def nemotron(kind: str, text: dict[str, Any]) -> PreTrainedConfig:
    eye = {**EYE, "model_type": "radio", "video_temporal_patch_size": 2}
    return transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=eye, vision_hidden_size=16, projector_hidden_size=16
    )


KINDS = {
    "minicpmv4_6": ("qwen3_5", minicpm, "MiniCPMV4_6ForConditionalGeneration"),
    "minicpmv4_7": ("qwen3_5", minicpm, "MiniCPMV4_7ForConditionalGeneration"),
    "minicpm_ocr": ("qwen3_5", minicpm, "MiniCPMOcrForConditionalGeneration"),
    "nemotron_h_omni": ("nemotron_h", nemotron, "NemotronH_Omni_Reasoning_V3"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_other_models_is_read(kind: str, tmp_path: Path) -> None:
    family, configure, name = KINDS[kind]
    samples = (draw(family, seed) for seed in range(50))
    own = next(one for one in samples if not (one.multimodal or one.mtp or one.sharded)).config
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(module, name)(configure(kind, own.to_dict())).eval()
    model.save_pretrained(tmp_path)
    tokens = [Random(i).randrange(own.vocab_size) for i in range(30)]
    with torch.inference_mode():
        expected_TV = model(input_ids=torch.tensor([tokens])).logits[0]
    found_TV = Runner(tmp_path, torch.float32, kernels="cpu").read(tokens, 7)
    assert relative(found_TV, expected_TV) < LOGITS_RELATIVE
    assert families.unread_fields(Checkpoint(tmp_path).config) == []


def test_a_language_model_has_another_name_too(tmp_path: Path) -> None:
    text = draw("nemotron_h", 0).config.to_dict()
    outer = {"model_type": "nemotron_h_omni", "llm_config": text, "vision_config": {"depth": 3}}
    assert families.network(outer).layers == families.network(text).layers
    assert families.unread_fields({**outer, "llm_config": {**text, "gamma": 2}}) == ["gamma"]
