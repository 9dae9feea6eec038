"""Sizes in config.json that the tensors lack are refused from headers, before memory is allocated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import SpecEngine
from specdec.config.engine import EngineConfig
from specdec.errors import CheckpointError
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import read_network
from specdec.models.fields import LARGEST
from specdec.models.headers import check_headers
from specdec.models.heads import OwnHead
from specdec.setup.resolve import open_model
from tests.models.agreeing import write_agreeing
from tests.models.fp8_checkpoints import sample, write
from tests.models.random_checkpoints import FAMILIES, HEADS, Sample, draw, edit_config, save
from tests.models.test_eagle import PUBLISHED, published

SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads"),
    *("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim", "linear_conv_kernel_dim"),
    *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel"),
    *("num_experts", "n_routed_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size"),
}
"""Fields that determine tensor sizes; a tensor of the largest such size cannot be allocated anywhere."""
VAST = LARGEST - LARGEST % 960
"""A multiple of every head and group count in the samples."""


def text(config: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = config.get("text_config", config)
    return own


def change(folder: Path, **fields: Any) -> None:
    """Change fields of the language model's config."""
    config = json.loads((folder / "config.json").read_text())
    text(config).update(fields)
    (folder / "config.json").write_text(json.dumps(config))


def of_family(family: str) -> Callable[[Path], object]:
    """Write a model with a multi-token head if the family has one, and with separate expert tensors."""
    seeds = (draw(family, seed) for seed in range(200))
    drawn = next(s for s in seeds if s.mtp or family not in HEADS)
    own = Sample(family, drawn.seed, drawn.config, drawn.mtp, False, True, drawn.multimodal)
    return lambda folder: save(own, folder)


WRITERS: dict[str, Callable[[Path], object]] = {
    **{family: of_family(family) for family in FAMILIES},
    "fp8": lambda folder: write(sample("qwen3_next", mtp=True), folder, folder.with_name("twin")),
}


@pytest.mark.parametrize("which", WRITERS)
def test_sizes_beyond_the_tensors_are_refused_by_field(which: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    WRITERS[which](folder)
    right = (folder / "config.json").read_text()
    open_model(folder, EngineConfig())
    tried = SIZES & {name for name, value in text(json.loads(right)).items() if type(value) is int and value}
    assert "vocab_size" in tried
    has_experts = any(".experts." in name for name in Checkpoint(folder).names())
    for name in sorted(tried):
        change(folder, **{name: VAST})
        if refused := refusal(folder):
            assert name in str(refused), (name, str(refused))
            assert "\n" not in str(refused) and len(str(refused)) < 2000
        else:
            assert name == "intermediate_size" and has_experts, name  # no layer may be dense
        (folder / "config.json").write_text(right)


def refusal(folder: Path) -> CheckpointError | None:
    try:
        open_model(folder, EngineConfig())
    except CheckpointError as error:
        return error
    return None


def test_tied_weights_name_the_vocabulary_found_and_claimed(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copied(checkpoint(), tmp_path)
    edit_config(folder, vocab_size=60_000_000)
    with pytest.raises(CheckpointError) as refused:
        SpecEngine(folder)
    shown = "model.embed_tokens.weight is [320, 48], config.json makes it [60000000, 48] (vocab_size)"
    assert shown in str(refused.value)
    assert refused.value.field == "model.embed_tokens.weight"


def copied(source: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("how", ["eagle", "eagle3"])
@pytest.mark.parametrize("name", ["intermediate_size", "num_attention_heads"])
def test_a_draft_head_is_held_against_its_own_headers(how: str, name: str, tmp_path: Path) -> None:
    write_agreeing(tmp_path / "target", "qwen3_5")
    published(tmp_path / "head", tmp_path / "target", PUBLISHED[how])
    config = EngineConfig(draft="eagle", draft_model=str(tmp_path / "head"))
    open_model(tmp_path / "target", config)
    edit_config(tmp_path / "head", **{name: VAST})
    with pytest.raises(CheckpointError, match=rf"^draft_model: .*is no head.*\({name}") as refused:
        open_model(tmp_path / "target", config)
    assert refused.value.field == "draft_model"


def test_layers_without_end_are_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(checkpoint(), tmp_path)
    edit_config(folder, num_hidden_layers=10**9)
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 1000000000; specdec needs .* at most"):
        SpecEngine(folder)


def test_no_tensor_is_read_to_compare_headers(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Checkpoint(checkpoint())
    network = read_network(own)

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(own, "tensor", refuse)
    check_headers(own, network, OwnHead(network.mtp) if network.mtp else None)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("wrong", [-1, 320, [2, 10**30], True, [True], "2", ["2"], 2.0])
def test_end_tokens_outside_the_vocabulary_are_refused_by_file(
    file: str, wrong: object, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copied(checkpoint(), tmp_path)
    own = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**own, "eos_token_id": wrong}))
    with pytest.raises(CheckpointError, match=rf"^{file}: eos_token_id is .*; specdec needs ") as refused:
        SpecEngine(folder)
    assert refused.value.field == "eos_token_id"


def test_the_last_token_of_the_vocabulary_may_end_a_text(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copied(checkpoint(), tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 319]}')
    assert read_network(Checkpoint(folder)).eos == (0, 319)
