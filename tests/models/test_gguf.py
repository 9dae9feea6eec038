"""GGUF files load as the checkpoints they were made from; the package gguf is the oracle."""

import contextlib
import json
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.config.engine import EngineConfig
from specdec.errors import CheckpointError, ConfigError
from specdec.kernels.linear.integers import Integers
from specdec.models import families
from specdec.models.checkpoint import Checkpoint
from specdec.models.folder import find_folder
from specdec.models.gguf import architectures as gguf_architectures
from specdec.models.gguf import blocks
from specdec.models.gguf import file as gguf_file
from specdec.models.gguf import folder as gguf_folder
from specdec.models.gguf import metadata as gguf_metadata
from specdec.models.gguf.architectures import DescribedFile
from specdec.models.gguf.blocks import integers, offsets, scales, widen
from specdec.models.gguf.file import MOST_BYTES, MOST_STRINGS, GgufFile, GgufTensor
from specdec.models.gguf.storage_types import TYPES, GgufType
from specdec.models.gguf.tensors import GgufTensors
from specdec.setup.footprint import describe_model
from specdec.setup.resolve import open_model
from specdec.text.tokenizer import load_tokenizer
from tests.models.gguf_files import WRITTEN, add_fields, write_folder
from tests.models.random_checkpoints import edit_config
from tests.models.runner import Runner
from tests.selection import EXHAUSTIVE

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_folder, "descriptions", lambda: tmp_path / "descriptions")


BLOCKS = [kind for kind in TYPES.values() if kind.block_size > 1]
SCALES = {
    **{"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
    **{"MXFP4": (), "NVFP4": (), "IQ1_M": ()},
}
"""Offsets of a block's float16 numbers, if they are not only at its start."""
INTEGER_BLOCKS = [kind for kind in BLOCKS if kind.bits]


def random_blocks(kind: GgufType, count: int, seed: int, size: float = 1.0) -> Any:
    """Draw blocks whose scales have moderate size, `size` if they are float16."""
    rng = np.random.default_rng(seed)
    block_BX = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    for at in SCALES.get(kind.name, (0,)):
        block_BX[:, at : at + 2] = (size * rng.normal(size=(count, 1))).astype(np.float16).view(np.uint8)
    if kind.name == "MXFP4":  # products beyond float32's range are a warning in gguf
        block_BX[:, 0] = rng.integers(0, 250, count)
    if kind.name == "IQ1_M":  # four bits in each of four words
        own_B = (size * rng.normal(size=count)).astype(np.float16).view(np.uint16)
        for i in range(4):
            block_BX[:, 49 + 2 * i] = block_BX[:, 49 + 2 * i] & 15 | (own_B >> 4 * i & 15) << 4
    return block_BX


def dequantize(block_BX: Any, kind: GgufType) -> Tensor:
    """Dequantize blocks with gguf, or by llama.cpp's definition for the two types gguf does not know."""
    bits = {"Q1_0": 1, "Q2_0": 2}.get(kind.name)
    if bits is None:
        found = gguf.quants.dequantize(block_BX, gguf.GGMLQuantizationType[kind.name])
        return torch.from_numpy(found)
    rows = []
    for block in block_BX:
        own = struct.unpack("<e", block[:2].tobytes())[0]
        packed = int.from_bytes(block[2:].tobytes(), "little")
        digits = [packed >> bits * i & (1 << bits) - 1 for i in range(kind.block_size)]
        rows.append([own * (2 * digit - 1 if bits == 1 else digit - 1) for digit in digits])
    return torch.tensor(rows)


def test_codebooks_are_those_of_gguf() -> None:
    for kind in TYPES.values():
        own = getattr(gguf.quants, kind.name, None)
        if kind.vectors is None:
            assert not getattr(own, "grid_hex", None), kind.name
            continue
        own = gguf.quants.IQ1_S if kind.name == "IQ1_M" else own
        own.init_grid()
        assert kind.vectors.dtype == np.int8 and np.array_equal(
            kind.vectors, own.grid.reshape(own.grid_shape)
        )


@pytest.mark.parametrize("kind", BLOCKS, ids=[kind.name for kind in BLOCKS])
def test_blocks_hold_the_numbers_that_they_hold_for_gguf(kind: GgufType) -> None:
    block_BX = random_blocks(kind, 50, 0)
    found = widen(block_BX.reshape(-1), kind, (50, kind.block_size))
    assert torch.equal(found, dequantize(block_BX, kind))


@pytest.mark.parametrize("kind", TYPES.values(), ids=[kind.name for kind in TYPES.values()])
@pytest.mark.parametrize("count", [1, 4, 63])
def test_blocks_are_rounded_by_pieces(kind: GgufType, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary's matrix would take twice as much memory in float32."""
    block_BX = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32).view(np.uint8)
    if kind.block_size > 1:
        block_BX = random_blocks(kind, count, 0, 0.1)
    data, shape = block_BX.reshape(-1), (count, block_BX.shape[1] // kind.block_bytes * kind.block_size)
    wide = widen(data, kind, shape)
    monkeypatch.setattr(blocks, "ROUNDED", 4 * kind.block_size)
    made: list[int] = []
    fill = blocks._fill
    monkeypatch.setattr(
        blocks, "_fill", lambda part, own, kind, out: made.append(out.numel()) or fill(part, own, kind, out)
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        found = widen(data, kind, shape, dtype)
        assert found.dtype == dtype and torch.equal(found.nan_to_num(), wide.to(dtype).nan_to_num())
    assert all(size <= 4 * kind.block_size for size in made) and sum(made) in (0, 3 * wide.numel())


@pytest.mark.parametrize("kind", INTEGER_BLOCKS, ids=[kind.name for kind in INTEGER_BLOCKS])
def test_dequantised_integers_equal_the_reference(kind: GgufType) -> None:
    """Equal except for the last bit of a sum of two numbers."""
    block_BX = random_blocks(kind, 60, 1)
    data, shape = block_BX.reshape(-1), (20, 3 * kind.block_size)
    assert kind.bits
    number_ND = integers(data, kind, shape)
    assert -(1 << kind.bits - 1) <= int(number_ND.min()) and int(number_ND.max()) < 1 << kind.bits - 1
    scale_NG, offset_NG = scales(data, kind, shape), offsets(data, kind, shape) if kind.offsets else None
    own = Integers(number_ND, scale_NG, kind.bits, torch.float32, offset_NG=offset_NG, group=kind.group)
    wide_ND = widen(data, kind, shape)
    size_NG = scale_NG.float().abs() * (1 << kind.bits) + (0 if offset_NG is None else offset_NG.abs())
    limit_ND = 2**-23 * size_NG.repeat_interleave(kind.group, 1)
    assert ((own.wide() - wide_ND).abs() <= (limit_ND if kind.offsets else 0)).all()


WIDER = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4")


def blocks_file(path: Path, kind: GgufType, *, wide: bool) -> Path:
    """Write a Llama file of random blocks or, if `wide`, of the dequantized weights.

    NVFP4's scales are brought to a moderate size by a number next to each matrix.
    """
    writer = gguf.GGUFWriter(path, "llama")
    hidden, size = 256, 0.06 / float(dequantize(random_blocks(kind, 50, 0), kind).std())
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    table = np.random.default_rng(7).normal(size=(61, hidden)).astype(np.float32)
    writer.add_tensor("token_embd.weight", table)
    writer.add_tensor("output.weight", table[::-1].copy())
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for seed, part in enumerate(parts):
        block_BX = random_blocks(kind, hidden * hidden // kind.block_size, seed, size)
        factor, name = size if kind.name == "NVFP4" else 1.0, f"blk.0.{part}"
        if wide:
            own = factor * dequantize(block_BX, kind).reshape(hidden, hidden)
            writer.add_tensor(f"{name}.weight", own.numpy())
            continue
        raw = gguf.GGMLQuantizationType[kind.name]
        writer.add_tensor(f"{name}.weight", block_BX.reshape(hidden, -1), raw_dtype=raw)
        if factor != 1:
            writer.add_tensor(f"{name}.scale", np.full(1, factor, np.float32))
            writer.add_tensor(f"{name}.input_scale", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Allocations(TorchDispatchMode):
    """Record the storages that torch operations allocate, by address, and keep them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            storage = out.untyped_storage()
            self.storages.setdefault(storage.data_ptr(), storage)
        return out

    def sizes(self) -> list[int]:
        return sorted((own.nbytes() for own in self.storages.values()), reverse=True)


def test_a_rearranged_and_scaled_matrix_is_never_whole_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bfloat16 form and the rearranged copy are the only large allocations."""
    kind = next(own for own in TYPES.values() if own.name == "NVFP4")
    monkeypatch.setattr(DescribedFile, "keeps_integers", lambda *_: False)
    file, name = (
        blocks_file(tmp_path / "small.gguf", kind, wide=False),
        "model.layers.0.self_attn.q_proj.weight",
    )
    expected = GgufTensors(file).get_tensor(name)
    assert expected.shape == (256, 256) and expected.any()
    monkeypatch.setattr(blocks, "ROUNDED", 1 << 12)
    with Allocations() as made:
        found = GgufTensors(file).get_tensor(name, torch.bfloat16)
    first, second, *pieces = made.sizes()
    assert first == second == 2 * 256 * 256 and max(pieces) <= 4 << 12
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("name", WIDER)
def test_logits_of_quantised_weights_equal_those_of_their_dequantised_form(name: str, tmp_path: Path) -> None:
    """Equal except that activations, and products of two scales, are rounded."""
    kind = next(own for own in TYPES.values() if own.name == name)
    logits = []
    for wide in (False, True):
        path = blocks_file(tmp_path / f"{wide}.gguf", kind, wide=wide)
        runner = Runner(path, torch.float32, kernels="native")
        logits += runner.step([(runner.sequence(), [7 * i % 61 for i in range(24)])])
    found, expected = logits
    assert 1e-6 < (found - expected).norm() / expected.norm() < 0.03
    stored = families.stored_format(Checkpoint(tmp_path / "False.gguf").config)
    said = rf"{name} matrices of 0\.00 GB take 0\.00 GB: no kernel multiplies their bits as stored"
    assert stored and stored.packed and re.fullmatch(said, stored.packed.note)


@pytest.mark.parametrize("kind", BLOCKS, ids=[kind.name for kind in BLOCKS])
def test_blocks_that_are_cut_off_or_damaged_are_refused(kind: GgufType, tmp_path: Path) -> None:
    def read(inputs: int, data: bytes) -> GgufTensor:
        head = b"GGUF" + struct.pack("<IQQQ1sIQQIQ", 3, 1, 0, 1, b"a", 2, inputs, 2, kind.id, 0)
        (path := tmp_path / "small.gguf").write_bytes(head + bytes(-len(head) % 32) + data)
        return GgufFile(path).entries["a"]

    whole = bytes(2 * 3 * kind.block_bytes)
    assert (
        not widen((own := read(3 * kind.block_size, whole)).data, own.kind, own.shape).any()
        or kind.name == "MXFP4"
    )
    with pytest.raises(CheckpointError, match="a extends past the end of the file"):
        read(3 * kind.block_size, whole[:-1])
    for inputs in (1, kind.block_size - 1, kind.block_size + 1, 3 * kind.block_size // 2):
        with pytest.raises(
            CheckpointError, match=rf"has the shape \[2, {inputs}\], which {kind.name} cannot"
        ):
            read(inputs, whole)


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ffn_up.scale"])
def test_no_memory_is_taken_for_tensors_of_another_shape(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of 4 KB on disk may claim 2^33 numbers, which are 34 GB in float32."""
    kind, head = next(own for own in TYPES.values() if own.name == "Q1_0"), bytearray()
    for field, value in (("block_count", 1), ("embedding_length", 256), ("attention.head_count", 2)):
        key = f"llama.{field}".encode()
        head += struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, value)
    head += struct.pack("<Q20sIQ5s", 20, b"general.architecture", 8, 5, b"llama")
    head += struct.pack("<Q25sIf", 25, b"llama.rope.scaling.factor", 6, 1.0)
    for own, numbers in ((name, 1 << 33), ("blk.0.ffn_up.weight", 128)):
        disk = own.encode()
        head += struct.pack("<Q", len(disk)) + disk + struct.pack("<IQIQ", 1, numbers, kind.id, 0)
    with (path := tmp_path / "sparse.gguf").open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 2, 5) + head)
        file.truncate((1 << 26) * kind.block_bytes + 4096)
    for module in (gguf_metadata, gguf_architectures):
        monkeypatch.setattr(module, "widen", lambda *_: pytest.fail("the tensor was read"))
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} has the shape \[8589934592\]"):
        DescribedFile(GgufFile(path)).rope()


@pytest.mark.parametrize("name", ["IQ2_XS", "IQ1_S", "IQ3_S", "NVFP4"])
def test_absurd_scales_are_refused(name: str, tmp_path: Path) -> None:
    """Float16 holds no finite number above 65,504, and NaN would spread to all logits."""
    kind = next(own for own in TYPES.values() if own.name == name)
    data = bytearray(blocks_file(tmp_path / "small.gguf", kind, wide=False).read_bytes())
    entry = GgufFile(tmp_path / "small.gguf").entries["blk.0.ffn_down.weight"]
    if name == "NVFP4":
        entry = GgufFile(tmp_path / "small.gguf").entries["blk.0.ffn_down.scale"]
    for absurd in (b"\xff\x7f", b"\x00\x7c", b"\xff\x7b"):  # NaN, Inf and 65,504, times further scales
        at = entry.offset + (2 if name == "NVFP4" else 0)
        data[at : at + 2] = b"\xc0\x7f" if name == "NVFP4" else absurd
        (path := tmp_path / "absurd.gguf").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"most of float16|NaN or Inf"):
            Runner(path, torch.float32)


def test_a_scale_belongs_to_the_weight_alone(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def extend(writer: Any) -> None:
        writer.add_tensor("blk.0.ffn_up.bias", np.full(96, 3, np.float32))
        writer.add_tensor("blk.0.ffn_up.scale", np.full(1, 2, np.float32))

    folder = checkpoint(LLAMA)
    found = GgufTensors(write_folder("llama", folder, tmp_path / "small.gguf", extend=extend))
    own = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found.get_tensor(own), 2 * Checkpoint(folder).tensor(own).float())
    assert torch.equal(found.get_tensor(own.replace("weight", "bias")), torch.full((96,), 3.0))


@pytest.mark.parametrize("name", ["blk.2.a.weight", "blk.00.a.weight", "blk.x.a.weight", "blk."])
def test_tensors_outside_the_blocks_are_refused(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    def extend(writer: Any) -> None:
        writer.add_tensor(name, np.zeros((4, 4), np.float32))

    path = write_folder("llama", checkpoint(LLAMA), tmp_path / "small.gguf", extend=extend)
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(name)} is (not in one of the 2 blocks|no name)"
    ) as wrong:
        Checkpoint(path)
    assert wrong.value.field == name


def test_a_tag_behind_a_file_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "small.gguf").write_bytes(b"GGUF")
    for own in (f"{path}:Q4_K_M", f"{path}:"):
        with pytest.raises(CheckpointError, match=r"is one file; leave out :"):
            find_folder(own)
    with pytest.raises(CheckpointError, match="does not exist; give the path of a GGUF file"):
        find_folder("absent.gguf:Q4_K_M")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "lfm2"])
def test_a_file_equals_its_source_checkpoint(
    family: str, family_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(family_folder(family), folder)
    if family in ("llama", "qwen2"):  # their files lack windows and scale positions differently
        plain = {"rope_type": "default", "rope_theta": 10_000.0}
        edit_config(folder, use_sliding_window=False, layer_types=None, rope_parameters=plain)
    if family == "lfm2":  # its files state the adjusted width
        edit_config(folder, block_auto_adjust_ff_dim=False, intermediate_size=24)
    path = write_folder(family, folder, tmp_path / "small.gguf")
    assert_equal(Checkpoint(path), Checkpoint(folder))
    assert find_folder(tmp_path) == find_folder(path), "a folder that holds one file is that file"


@pytest.mark.parametrize(("form", "bits"), [("Q8_0", 8), ("Q5_0", 6), ("Q4_0", 4), ("F16", None)])
def test_integer_weights_stay_packed(
    form: str, bits: int | None, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Integers stay packed after rows are permuted and restored; other block types are widened."""
    folder = checkpoint(LLAMA)
    path = write_folder("llama", folder, tmp_path / "small.gguf", form=form)
    found, expected = weights_of(path), weights_of(folder)
    for name, shape in (("layers.0.mixer.q.weight", (64, 64)), ("layers.1.ffn.down.weight", (64, 96))):
        own, wide = found.matrix(name, shape), expected.matrix(name, shape)
        assert isinstance(wide, Tensor)
        rounded = gguf.quants.quantize(wide.numpy(), (kind := gguf.GGMLQuantizationType[form]))
        said = torch.from_numpy(gguf.quants.dequantize(rounded, kind))
        assert (own.bits if isinstance(own, Integers) else None) == bits
        assert torch.equal(own.wide() if isinstance(own, Integers) else own, said)


def test_frequencies_are_scaled_as_in_llama_3(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A file holds divisors, which transformers computes from four numbers."""
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, num_key_value_heads=2, rope_parameters=scaling
    )
    frequency_N, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain_N = 5e5 ** -(torch.arange(0, 128, 2) / 128)

    def read(divisor_N: Tensor) -> dict[str, Any]:
        writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
        for name, number in (("block_count", 1), ("embedding_length", 256), ("attention.head_count", 2)):
            writer.add_uint32(f"llama.{name}", number)
        writer.add_uint32("llama.feed_forward_length", 4)
        writer.add_context_length(64)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(5e5)
        writer.add_tensor("rope_freqs.weight", divisor_N.numpy())
        writer.add_tensor("token_embd.weight", np.zeros((4, 256), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found: dict[str, Any] = DescribedFile(GgufFile(tmp_path / "small.gguf")).config["rope_parameters"]
        return found

    assert read(plain_N / frequency_N) == scaling
    with pytest.raises(
        CheckpointError, match=r"rope_freqs\.weight has the shape \[32\], and heads have 128 rot"
    ):
        read(plain_N[:32] / frequency_N[:32])
    with pytest.raises(CheckpointError, match=r"scaled as in Llama 3\.1"):
        read(plain_N / frequency_N + torch.linspace(0, 1, 64))


def test_a_delta_net_and_its_head_equal_the_checkpoint(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as many value heads as key heads, interleaved in a file."""
    from specdec.bench.gguf_model import write_gguf
    from tests.bench.suited import SUITED
    from tests.conftest import HYBRID

    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", lambda self, name: None)
    folder, path = checkpoint(HYBRID, **SUITED), tmp_path / "small.gguf"
    write_gguf(Checkpoint(folder), path, "F32")
    assert any(name.startswith("mtp.") for name in Checkpoint(folder).names())
    assert_equal(Checkpoint(path), Checkpoint(folder))


def test_shapes_are_derived_without_torch_compile(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing it takes 1.2 s; arithmetic on meta tensors, such as norms and decays, would trigger that."""
    from specdec.bench.gguf_model import write_gguf
    from tests.bench.suited import SUITED
    from tests.conftest import HYBRID

    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", lambda self, name: None)
    path = tmp_path / "small.gguf"
    write_gguf(Checkpoint(checkpoint(HYBRID, **SUITED)), path, "F32")
    read = (
        "import sys; from specdec.models.checkpoint import Checkpoint; found = Checkpoint(sys.argv[1]);"
        "print([found.shape(name) for name in found.names()] and 'torch._dynamo' in sys.modules)"
    )
    folder = find_folder(path)
    command = [sys.executable, "-c", read, str(folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_integers_of_a_delta_net_are_in_the_order_of_the_checkpoint(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, and the columns of the last projection, move with the scales of their blocks."""
    from specdec.bench import throughput
    from specdec.bench.gguf_model import write_gguf
    from specdec.bench.options import ThroughputOptions
    from tests.bench.suited import SUITED
    from tests.conftest import HYBRID

    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", lambda self, name: None)
    heads = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    folder, path = checkpoint(HYBRID, **{**SUITED, **heads}), tmp_path / "small.gguf"
    write_gguf(Checkpoint(folder), path, "Q8_0")
    described = describe_model(path, EngineConfig(memory_bytes=1 << 26), [])
    assert described["stored_bytes"] == sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    options = ThroughputOptions(model=str(path), peers=["transformers"])
    with pytest.raises(ConfigError, match="transformers runs safetensors"):
        throughput.benchmark(options, EngineConfig())
    found, expected = Checkpoint(path), Checkpoint(folder)
    kept = [name.removesuffix("_scale") for name in found.names() if name.endswith("_scale")]
    assert {name.rpartition("linear_attn.")[2] for name in kept} >= {"in_proj_qkv.weight", "out_proj.weight"}
    for name in kept:
        own = found.tensor(name) * found.tensor(f"{name}_scale").float().repeat_interleave(32, 1)
        wide = expected.tensor(name).float()
        assert (own - wide).norm() < 0.01 * wide.norm(), name
    # Blocks of K types are too wide for so small a model: test scales of 32 or 16 columns separately.
    described = DescribedFile(GgufFile(path))
    for name in kept:
        number_ND, transform = found.tensor(name).float(), described.transform(name) or (lambda own: own)
        for group in (16, 32):
            scale_NG = torch.rand(number_ND.shape[0], number_ND.shape[1] // group)
            moved_NG = (described.transform(f"{name}_scale") or (lambda own: own))(scale_NG)
            expected = transform(number_ND * scale_NG.repeat_interleave(group, 1))
            assert torch.equal(transform(number_ND) * moved_NG.repeat_interleave(group, 1), expected), name


def assert_equal(found: Checkpoint, expected: Checkpoint) -> None:
    """Compare networks and all tensors; epsilons may differ by float32 rounding."""
    ours, theirs = families.read_network(found), families.read_network(expected)
    assert _rounded(str(ours)) == _rounded(str(theirs))
    wanted = families.layout(theirs).wanted(frozenset(expected.names()), mtp=bool(theirs.mtp))
    for name in wanted:
        bare = name if name in found else name.replace("model.language_model.", "model.")
        assert torch.allclose(found.tensor(bare), expected.tensor(name).float(), rtol=1e-6, atol=1e-6), name
    assert all(found.shape(name) == tuple(found.tensor(name).shape) for name in found.names())


LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
}


def weights_of(model: Path) -> Any:
    checkpoint = Checkpoint(model)
    return families.open_weights(checkpoint, families.read_network(checkpoint), dtype=torch.float32)


def _rounded(text: str) -> str:
    """Round a description's numbers to six digits, and drop end tokens, which no file here has."""
    text = re.sub(r"eos=\([^)]*\)", "", text)
    return re.sub(r"\d+\.\d+(e-?\d+)?|\d+e-\d+", lambda own: f"{float(own[0]):.6g}", text)


TEXTS = (
    *("Hello, world! 12345 67", "naïve café — ‘quotes’", "日本語テキスト 🙂👍🏽", "  leading\n\n\ttabs  "),
    *(
        "def f(x):\n    return x**2",
        "it's WE'LL I'D",
        "<|end|>not special<|end",
        "e\u0301 caf\u00e9 \u00a0\u200b",
    ),
)
SPLIT = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
}
"""Published tokenizers' patterns, by the names that files give them."""


@pytest.mark.parametrize("pre", SPLIT)
@pytest.mark.parametrize("begins", [False, True])
def test_a_files_tokenizer_equals_its_source_tokenizer(
    pre: str, begins: bool, family_folder: Callable[..., Path], tmp_path: Path
) -> None:
    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(SPLIT[pre])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    theirs.train_from_iterator([*TEXTS, Path(__file__).read_text()], trainer)
    described = json.loads(theirs.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)

    def extend(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token == "<|end|>" else 1 for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in described["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_add_bos_token(begins)
        writer.add_chat_template("{{ messages[0].content }}")

    path = write_folder("qwen3", family_folder("qwen3"), tmp_path / "small.gguf", extend=extend)
    folder = find_folder(path)
    ours = load_tokenizer(folder)
    assert ours
    for text in TEXTS:
        assert list(ours.encode(text)) == [0] * begins + theirs.encode(text).ids, text
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [0]}
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"].startswith("{{")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Write a file with one tensor and a field of each kind."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    for name, value in (("uint32", 7), ("int64", -7), ("float32", 0.5), ("bool", True), ("string", "ü")):
        getattr(writer, f"add_{name}")(f"tests.{name}", value)
    writer.add_array("tests.words", ["a", "bc", ""])
    writer.add_array("tests.numbers", [1, 2, 3])
    writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize(("kind", "most"), [(0, "MOST_BYTES"), (8, "MOST_STRINGS")], ids=["bytes", "strings"])
def test_all_metadata_have_one_bound(
    kind: int, most: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many fields of moderate size would add up."""
    monkeypatch.setattr(gguf_file, most, 1000)
    head, path = b"GGUF" + struct.pack("<IQQ", 3, 0, 3), tmp_path / "a.gguf"
    each = [
        struct.pack("<Q", 1) + name + struct.pack("<IIQ", 9, kind, 400) + bytes(400 * (8 if kind == 8 else 1))
        for name in (b"a", b"b", b"c")
    ]
    path.write_bytes(head + b"".join(each))
    with pytest.raises(CheckpointError, match=r"c has 400 (bytes|strings), and may have "):
        GgufFile(path)


def test_oversized_metadata_are_not_read(tmp_path: Path) -> None:
    """Strings may be empty, and the file sparse: 8 GiB of numbers took 16 GB of memory."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    for value, said in (
        (struct.pack("<IIQ", 9, 8, MOST_STRINGS + 1), "a has 4,194,305 strings"),
        (struct.pack("<IIQ", 9, 8, 1 << 40), "too short for them"),
        (struct.pack("<IIQ", 9, 0, MOST_BYTES + 1), "a has 134,217,729 bytes"),
        (struct.pack("<IQ", 8, MOST_BYTES + 1), "a has 134,217,729 bytes"),
    ):
        with (tmp_path / "a.gguf").open("wb") as file:
            file.write(head + value)
            file.truncate(MOST_BYTES + 1000)
        with pytest.raises(CheckpointError, match=said):
            GgufFile(tmp_path / "a.gguf")


def test_metadata_and_tensors_equal_those_written_by_gguf(small: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "small.gguf").write_bytes(small)
    file = GgufFile(path)
    assert file.metadata["tests.uint32"] == 7 and file.metadata["tests.int64"] == -7
    assert file.metadata["tests.float32"] == 0.5 and file.metadata["tests.bool"] is True
    assert file.metadata["tests.string"] == "ü" and file.strings("tests.words") == ("a", "bc", "")
    assert file.metadata["tests.numbers"].tolist() == [1, 2, 3]
    entry = file.entries["token_embd.weight"]
    assert entry.shape == (2, 32) and entry.data.view(np.float32).tolist() == list(range(64))


@pytest.mark.parametrize(("count", "is_read"), [(1, True), (4, False)])
def test_tensors_that_share_their_bytes_are_refused(count: int, is_read: bool, tmp_path: Path) -> None:
    """Otherwise a small file could describe more tensors than fit in memory."""
    header = b"GGUF" + struct.pack("<IQQ", 3, count, 0)
    for i in range(count):
        header += struct.pack("<Q1sIQIQ", 1, b"abcd"[i : i + 1], 1, 64, 0, 0)  # 64 numbers in float32, at 0
    path = tmp_path / "small.gguf"
    path.write_bytes(header + bytes(-len(header) % 32 + 256))
    if is_read:
        assert len(GgufFile(path).entries) == count
    else:
        with pytest.raises(CheckpointError, match="its tensors overlap"):
            GgufFile(path)


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=EXHAUSTIVE)])
def test_no_damage_does_more_than_refuse_the_file(count: int, small: bytes, tmp_path: Path) -> None:
    """Bytes are changed, the end is cut off, or numbers are made huge."""
    rng, path, refused = random.Random(0), tmp_path / "small.gguf", 0
    for _ in range(count):
        path.write_bytes(damaged(small, rng))
        with contextlib.suppress(CheckpointError):
            GgufFile(path)
            continue
        refused += 1
    assert count / 2 < refused < count


def damaged(data: bytes, rng: random.Random) -> bytes:
    own, kind = bytearray(data), rng.randrange(3)
    header = len(data) - 256
    if kind == 0:
        for _ in range(rng.choice([1, 2, 8])):
            own[rng.randrange(header)] = rng.randrange(256)
    elif kind == 1:
        del own[rng.randrange(len(own)) :]
    else:
        at = rng.randrange(header - 8)
        own[at : at + 8] = struct.pack("<Q", rng.choice([2**63 - 1, 2**64 - 1, 2**32, 1 << 40]))
    return bytes(own)


@pytest.mark.parametrize(
    ("change", "field", "why"),
    [
        ({"architecture": "gpt-j"}, "general.architecture", "'gpt-j'; specdec needs one of llama.*qwen3"),
        (
            {"string": ("qwen3.rope.scaling.type", "longrope")},
            "qwen3.rope.scaling.type",
            "'longrope'; specdec needs none, linear or yarn",
        ),
        ({"uint32": ("qwen3.expert_count", 8)}, "qwen3.expert_count", "is 8; specdec needs 0"),
        ({"string": ("tokenizer.ggml.model", "gpt2")}, "tokenizer.ggml.tokens", "a list of strings"),
        ({"float32": ("qwen3.rope.scaling.factor", -4.0)}, "qwen3.rope.scaling.factor", "above 0"),
        (
            {"float32": ("qwen3.rope.scaling.yarn_attn_factor", 2.0)},
            "qwen3.rope.scaling.yarn_attn_factor",
            "is 2.0; specdec needs 1",
        ),
        ({"uint32": ("qwen3.nextn_predict_layers", 9)}, "qwen3.nextn_predict_layers", "less than"),
        ({"uint32": ("qwen3.nextn_predict_layers", 1)}, "qwen3.nextn_predict_layers", "has no nextn tensors"),
        ({"uint32": ("split.count", 2)}, "split.count", "one of 2 files"),
        ({"string": ("general.type", "adapter")}, "general.type", "'adapter'; specdec needs 'model'"),
        ({"array": ("general.type", [1, 2])}, "general.type", "needs a string"),
        ({"array": ("qwen3.rope.scaling.type", [1, 2])}, "qwen3.rope.scaling.type", "needs a string"),
        ({"array": ("tokenizer.ggml.model", [1, 2])}, "tokenizer.ggml.model", "needs a string"),
        ({"architecture": 7}, "general.architecture", "is 7; specdec needs a string"),
    ],
)
def test_what_is_not_read_is_named(
    change: dict[str, Any], field: str, why: str, family_folder: Callable[..., Path], tmp_path: Path
) -> None:
    def extend(writer: Any) -> None:
        for kind, value in change.items():
            if kind == "architecture":
                kinds = gguf.GGUFValueType
                own = writer.kv_data[0]["general.architecture"]
                own.value, own.type = value, kinds.STRING if isinstance(value, str) else kinds.UINT32
            else:
                getattr(writer, f"add_{kind}")(*value)

    path = write_folder("qwen3", family_folder("qwen3"), tmp_path / "small.gguf", extend=extend)
    with pytest.raises(CheckpointError, match=why) as wrong:
        Checkpoint(path)
    assert wrong.value.field == field


def write_parts(folder: Path, to: Path, *, numbers: tuple[int, ...], firsts: tuple[int, ...]) -> None:
    """Write three parts with some values of split.no; the first has no tensors."""
    whole = gguf.GGUFReader(write_folder("llama", folder, to / "whole.gguf"))
    names = [tensor.name for tensor in whole.tensors]
    for i, own in enumerate((names[:0], names[firsts[0] : 5], names[firsts[1] :])):
        writer = gguf.GGUFWriter(to / f"part-{i + 1:05}-of-00003.gguf", "llama")
        writer.add_uint16("split.count", 3)
        writer.add_uint16("split.no", numbers[i])
        writer.add_int32("split.tensors.count", len(names))
        if i == 0:
            add_fields(writer, WRITTEN["llama"], Checkpoint(folder).config)
        for tensor in whole.tensors:
            if tensor.name in own:
                writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@pytest.mark.parametrize(
    ("numbers", "firsts", "field", "why"),
    [
        ((0, 2, 1), (0, 5), "split.no", r"part-00002-of-00003\.gguf: split\.no is 2, .* it should be 1"),
        ((0, 1, 2), (1, 5), "split.tensors.count", r"00001-of-00003\.gguf: split\.tensors\.count is"),
        ((0, 1, 2), (0, 4), None, r"00003-of-00003\.gguf: an earlier part has the tensor blk"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(
    numbers: tuple[int, ...],
    firsts: tuple[int, ...],
    field: str | None,
    why: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    write_parts(checkpoint(LLAMA), tmp_path, numbers=numbers, firsts=firsts)
    with pytest.raises(CheckpointError, match=why) as wrong:
        Checkpoint(tmp_path / "part-00001-of-00003.gguf")
    assert field is None or wrong.value.field == field


def test_a_file_that_is_split_is_one_model(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The first part may hold only metadata."""
    folder = checkpoint(LLAMA)
    write_parts(folder, tmp_path, numbers=(0, 1, 2), firsts=(0, 5))
    (tmp_path / "link-00001-of-00003.gguf").symlink_to(tmp_path / "part-00001-of-00003.gguf")
    assert_equal(Checkpoint(tmp_path / "part-00001-of-00003.gguf"), Checkpoint(folder))
    with pytest.raises(CheckpointError, match="is a later part; give the first, part-00001-of-00003"):
        Checkpoint(tmp_path / "part-00002-of-00003.gguf")
    with pytest.raises(CheckpointError, match=r"of the 3 parts of link-00001-of-00003\.gguf 1 are there"):
        Checkpoint(tmp_path / "link-00001-of-00003.gguf")


@pytest.mark.parametrize(("form", "count"), [("F32", 6), ("Q8_0", 12)])
def test_tensors_at_fault_have_the_names_of_the_file(
    form: str, count: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    def extend(writer: Any) -> None:
        writer.kv_data[0]["llama.feed_forward_length"].value = 64
        writer.add_tensor("blk.0.attn_norm.bias", np.ones(64, np.float32))
        writer.add_tensor("output_norm.bias", np.ones(64, np.float32))

    path = write_folder("llama", checkpoint(LLAMA), tmp_path / "small.gguf", extend=extend, form=form)
    with pytest.raises(CheckpointError) as wrong:
        open_model(path, EngineConfig(draft="none", memory_bytes=1 << 20))
    said = str(wrong.value)
    assert "config.json" not in said and "safetensors" not in said and "model.layers" not in said
    assert f"{count} misshapen: blk.0.ffn_gate.weight is [96, 64], its metadata make it [64, 64]" in said
    assert ("blk.0.ffn_gate.weight_scale is [96, 2]" in said) == (form == "Q8_0")
    assert "2 unexpected: blk.0.attn_norm.bias, output_norm.bias; take another file" in said


def test_integers_take_less_memory_than_the_checkpoint(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint(LLAMA, dtype="bfloat16")
    path = write_folder("llama", folder, tmp_path / "small.gguf", form="Q4_1")
    config = EngineConfig(draft="none", memory_bytes=1 << 20, dtype="bfloat16")
    ours, theirs = (open_model(model, config).settings for model in (path, folder))
    assert ours.weight_bytes < theirs.weight_bytes / 2
    stored, size = families.open_tensors(Checkpoint(path)).sizes().stored, path.stat().st_size
    assert 0.8 * size < stored < size


def test_one_of_several_files_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "mmproj-a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"several GGUF files; give one of a\.gguf, b\.gguf$"):
        find_folder(tmp_path)


def test_a_folder_may_hold_a_file_named_as_the_link_of_a_description(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_folder("llama", checkpoint(LLAMA), tmp_path / "model.gguf")
    assert find_folder(tmp_path) == find_folder(path) != tmp_path


def test_descriptions_of_earlier_revisions_are_deleted(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_folder("llama", checkpoint(LLAMA), tmp_path / "small.gguf")
    cache = gguf_folder.descriptions()
    kept, old = cache / "notes", cache / "0123456789abcdef" / "old"
    for other in (kept, old):
        other.mkdir(parents=True)
    first = find_folder(path)
    assert kept.is_dir() and not old.parent.exists()
    monkeypatch.setattr(gguf_folder, "REVISION", gguf_folder.REVISION + 1)
    second = find_folder(path)
    assert second != first and not first.parent.exists()
    monkeypatch.setattr(gguf_folder, "REVISION", gguf_folder.REVISION - 1)
    assert find_folder(path) == first and second.is_dir(), "a later version's are its own"


def test_weights_are_called_by_the_types_of_the_file(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The most common first; vectors, which are F32 in every file, are not counted."""
    for form in ("Q8_0", "Q5_0"):
        path = write_folder("llama", checkpoint(LLAMA), tmp_path / f"{form}.gguf", form=form)
        stored = families.stored_format(Checkpoint(path).config)
        assert stored and stored.packed and stored.name == stored.packed.name == form
        assert describe_model(path, EngineConfig(), [64])["stored_types"] == form
    assert "stored_types" not in describe_model(checkpoint(LLAMA), EngineConfig(), [64])
