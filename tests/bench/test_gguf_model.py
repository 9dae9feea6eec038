import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.bench import gguf_model
from specdec.bench.gguf_model import FileType, cached_gguf, write_gguf
from specdec.errors import CapacityError, ConfigError
from specdec.models.checkpoint import Checkpoint
from tests.bench.suited import SUITED
from tests.conftest import HYBRID

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture
def suited(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(HYBRID, **SUITED)


def written(folder: Path, path: Path, kind: FileType) -> dict[str, Any]:
    write_gguf(Checkpoint(folder), path, kind)
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def wide(tensor: Any) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())


@pytest.mark.parametrize(
    ("kind", "within"), [("F32", 0.0), ("BF16", 0.004), ("Q8_0", 0.005), ("Q4_0", 0.125)]
)
def test_matrices_are_in_the_wanted_bits(kind: FileType, within: float, suited: Path, tmp_path: Path) -> None:
    tensors = written(suited, tmp_path / "model.gguf", kind)
    ours = Checkpoint(suited).tensor("model.layers.0.mlp.up_proj.weight")
    up = tensors["blk.0.ffn_up.weight"]
    assert up.tensor_type.name == kind
    assert (wide(up) - ours).abs().max() <= within * ours.abs().max()
    logits = "Q8_0" if kind == "Q4_0" else kind
    gates = "F32" if kind.startswith("Q") else kind
    assert tensors["token_embd.weight"].tensor_type.name == logits
    assert tensors["blk.0.ssm_alpha.weight"].tensor_type.name == gates
    for name in ("blk.0.ssm_conv1d.weight", "blk.0.ssm_a", "blk.0.attn_norm.weight"):
        assert tensors[name].tensor_type.name == "F32"


def test_tensors_have_llama_cpps_layout(suited: Path, tmp_path: Path) -> None:
    tensors, ours = written(suited, tmp_path / "model.gguf", "F32"), Checkpoint(suited)
    body = "model.layers.0."
    # Four value heads of two key heads: the first of each are first.
    turn = [0, 2, 1, 3]
    decay_H = -ours.tensor(f"{body}linear_attn.A_log").exp()[turn]
    assert torch.equal(wide(tensors["blk.0.ssm_a"]), decay_H)
    out_DN = ours.tensor(f"{body}linear_attn.out_proj.weight").view(64, 4, 16)[:, turn].reshape(64, 64)
    assert torch.equal(wide(tensors["blk.0.ssm_out.weight"]), out_DN)
    conv_CK = ours.tensor(f"{body}linear_attn.conv1d.weight").squeeze(1)
    value_CK = conv_CK[64:].view(4, 16, -1)[turn].reshape(64, -1)
    assert torch.equal(wide(tensors["blk.0.ssm_conv1d.weight"]), torch.cat([conv_CK[:64], value_CK]))
    for theirs, name in {
        "blk.0.attn_norm.weight": f"{body}input_layernorm.weight",
        "blk.3.attn_q_norm.weight": "model.layers.3.self_attn.q_norm.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.4.nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "blk.4.nextn.shared_head_norm.weight": "mtp.norm.weight",
    }.items():
        assert torch.equal(wide(tensors[theirs]), ours.tensor(name) + 1), theirs
    gated_W = ours.tensor(f"{body}linear_attn.norm.weight")
    assert torch.equal(wide(tensors["blk.0.ssm_norm.weight"]), gated_W)


def test_a_file_is_written_once_and_rewritten_for_other_weights(
    checkpoint: Callable[..., Path], suited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_model, "random_models", lambda: tmp_path)
    path = cached_gguf(suited, "BF16")
    before = path.stat().st_mtime_ns
    assert cached_gguf(suited, "BF16") == path and path.stat().st_mtime_ns == before
    others = {path, cached_gguf(suited, "F32"), cached_gguf(checkpoint(HYBRID, seed=1, **SUITED), "BF16")}
    assert len(others) == 3
    assert sorted(path.parent.iterdir()) == sorted(others)


def test_an_interrupted_file_is_not_kept(
    suited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_model, "random_models", lambda: tmp_path)
    monkeypatch.setattr(gguf_model, "_add_fields", stop)
    with pytest.raises(KeyboardInterrupt):
        cached_gguf(suited, "BF16")
    assert [*tmp_path.rglob("*.gguf")] == []


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_a_file_is_refused_only_if_the_disk_is_too_full(
    kind: FileType, suited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact to the byte, in the requested format."""
    monkeypatch.setattr(gguf_model, "random_models", lambda: tmp_path)
    size = (path := cached_gguf(suited, kind)).stat().st_size
    for missing in (0, 1):
        path.unlink()

        def usage(folder: Path, room: int = size - missing) -> SimpleNamespace:
            return SimpleNamespace(free=room - sum(file.stat().st_size for file in folder.iterdir()))

        monkeypatch.setattr(gguf_model.shutil, "disk_usage", usage)
        if not missing:
            assert cached_gguf(suited, kind).stat().st_size == size
    with pytest.raises(CapacityError, match=r"^--peers llama\.cpp: .* deleting earlier \*\.gguf") as caught:
        cached_gguf(suited, kind)
    assert caught.value.field == "peers" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({**SUITED, "linear_key_head_dim": 8}, "BF16", "one size for keys and values"),
        ({**SUITED, "hidden_size": 48}, "Q4_0", "Q4_0 rounds 32 numbers together, .* have 48"),
    ],
)
def test_models_without_a_gguf_form_are_refused(
    changes: dict[str, int], kind: FileType, says: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^--peers llama\.cpp: .*{says}") as caught:
        write_gguf(Checkpoint(checkpoint(HYBRID, **changes)), tmp_path / "model.gguf", kind)
    assert caught.value.field == "peers"
    assert os.listdir(tmp_path) == []


def test_another_family_is_refused_by_name(family_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the family nemotron_h is not written for it yet"):
        write_gguf(Checkpoint(family_folder("nemotron_h")), tmp_path / "model.gguf", "BF16")
