"""Families with sliding layers: equality with transformers, and the memory of such a layer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers

from specdec.errors import CheckpointError
from specdec.kernels.native.compiled import compiled
from specdec.models import families, spec
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import read_network
from specdec.models.mixers import Attention
from specdec.models.shapes import SHAPES
from specdec.models.work import ReadingWork
from tests.models.random_checkpoints import Sample, save
from tests.models.runner import Runner
from tests.models.test_network import relative
from tests.tolerances import LOGITS_RELATIVE
from tools.bench.time_model import StepWork, TimeModel
from tools.kernels import traffic

LENGTH = 70
NATIVE = "native" if compiled() else "cpu"
SLIDING, FULL = "sliding_attention", "full_attention"


def windows(network: spec.NetworkSpec) -> list[int | None]:
    return [mixer.window for mixer in network.mixers() if isinstance(mixer, Attention)]


def qwen3(folder: Path, seed: int, **own: Any) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=33,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.15,
        max_position_embeddings=512,
        **own,
    )
    return save(Sample("qwen3", seed, config, False, fused=True, sharded=False, multimodal=False), folder)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"sliding_window": 5, "max_window_layers": 1}, [None, 5, 5]),
        ({"sliding_window": 17, "layer_types": [SLIDING, FULL, SLIDING]}, [17, None, 17]),
        ({"sliding_window": 1, "layer_types": [SLIDING] * 3}, [1, 1, 1]),
        ({"sliding_window": 5, "max_window_layers": 3}, [None] * 3),
    ],
    ids=str,
)
def test_qwen3_slides_as_transformers_does(
    own: dict[str, Any], expected: list[int | None], tmp_path: Path
) -> None:
    model = qwen3(tmp_path, 1, use_sliding_window=True, **own)
    network = read_network(Checkpoint(tmp_path))
    assert windows(network) == expected
    rng = Random(1)
    tokens = [rng.randrange(61) for _ in range(LENGTH)]
    with torch.inference_mode():
        expected_TV = model(torch.tensor([tokens]), use_cache=False).logits[0]
    for kernels, chunk in (("cpu", 7), (NATIVE, 1), (NATIVE, 23), ("reference", 64)):
        found_TV = Runner(tmp_path, torch.float32, kernels=kernels).read(tokens, chunk)
        assert relative(found_TV, expected_TV) < LOGITS_RELATIVE


def test_qwen3s_config_decides_which_layers_slide(family_folder: Callable[..., Path]) -> None:
    config = dict(Checkpoint(family_folder("qwen3")).config)
    del config["layer_types"]
    assert windows(families.network(config | {"sliding_window": 8})) == [None, None]
    slides = config | {"use_sliding_window": True, "max_window_layers": 1}
    assert windows(families.network(slides | {"sliding_window": 8})) == [None, 8]
    assert windows(families.network(slides | {"sliding_window": None})) == [None, None]
    for fields, culprit in (
        ({"sliding_window": None, "layer_types": [SLIDING, FULL]}, "layer_types"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"max_window_layers": -1}, "max_window_layers"),
        ({"layer_types": [SLIDING, FULL], "use_sliding_window": False}, "layer_types"),
    ):
        with pytest.raises(CheckpointError) as refused:
            families.network(slides | fields)
        assert refused.value.field == culprit


def test_only_a_windows_pairs_are_counted(family_folder: Callable[..., Path]) -> None:
    network = read_network(Checkpoint(family_folder("lfm3")))
    assert windows(network) == [7, None, 7]
    work, tokens = ReadingWork.of(network), 50
    per_pair = 4.0 * 4 * 8
    pairs = [sum(min(t + 1, window or t + 1) for t in range(tokens)) for window in windows(network)]
    alone = replace(work, per_pair=())
    assert work(tokens) - alone(tokens) == pytest.approx(per_pair * sum(pairs))
    assert work(5) - alone(5) == pytest.approx(per_pair * 3 * 15)


def test_only_a_windows_keys_are_read() -> None:
    network = families.network(SHAPES["lfm3-1.7b"])
    attention = {mixer.window: mixer for mixer in network.mixers() if isinstance(mixer, Attention)}
    token = 2 * 4 * 128 * 2
    model = TimeModel(network)
    far, near = (model.step(StepWork(context=context))["keys and values"] for context in (10_000, 1000))
    assert far - near == 6 * 9000 * token
    moved = [traffic.attention(mixer, 1, 4, 1000, 2) for mixer in (attention[256], attention[None])]
    assert moved[1] - moved[0] == (1000 - 255) * token
