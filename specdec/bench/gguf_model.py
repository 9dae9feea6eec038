"""Convert a checkpoint to one GGUF file for llama.cpp, its matrices in the requested precision.

The file is for benchmarks, which send token ids: its vocabulary is numbers without an end of text, so that
outputs reach any length. Three things differ from transformers' layout: decays are -exp(A_log), the offset of
one is added to norms, and value heads are ordered so that those of one key head lie apart.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.bench.random_model import draft_folder
from specdec.config.folders import random_models
from specdec.errors import CapacityError, ConfigError
from specdec.models.checkpoint import Checkpoint, few
from specdec.models.families import layout, read_network
from specdec.models.feed_forward import MLP
from specdec.models.mixers.attention import Attention
from specdec.models.mixers.gated_delta_net import GatedDeltaNet
from specdec.models.spec import NetworkSpec

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter, TensorNameMap

FileType = Literal["F32", "F16", "BF16", "Q8_0", "Q4_0"]
"""Type of the matrices; norms, decays and convolutions are float32."""
ARCHITECTURES: Mapping[str, str] = {"qwen3": "QWEN3", "qwen3_5": "QWEN35"}
"""Supported families, as the gguf package spells them."""
REVISION = 1
"""Version of the files this module writes; others are rewritten."""
GROUP = 32
"""Inputs per Q8_0 or Q4_0 scale."""
GATES = ("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight")
"""Matrices that this engine never quantizes; the file does not either."""
LOGITS = ("embed_tokens.weight", "lm_head.weight")
"""The logits' matrices: this engine rounds them to 8 bits when others have 4."""
HEAD: Mapping[str, str] = {
    "fc.weight": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}
"""The MTP head without its layer. llama.cpp stores it in an extra block after the body's."""


def cached_gguf(folder: Path, kind: FileType) -> Path:
    """Return a checkpoint's GGUF file in the user's cache, writing it on first use."""
    checkpoint = Checkpoint(folder)
    name = checkpoint.folder.resolve().name
    files = sorted(path for path in checkpoint.folder.iterdir() if path.suffix in (".json", ".safetensors"))
    sources = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    recipe = json.dumps([sources, kind, REVISION, metadata.version("gguf")])
    path = random_models() / f"{name}-{kind}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft_folder(path.parent) as draft:
            write_gguf(checkpoint, draft / path.name, kind)
            os.replace(draft / path.name, path)
    return path


def write_gguf(checkpoint: Checkpoint, path: Path, kind: FileType) -> None:
    """Write a checkpoint's file, with one tensor in memory at a time."""
    import gguf

    network = read_network(checkpoint)
    refuse_unlike(network)
    entries = list(_entries(checkpoint, network, kind))
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[network.family]]
    with closing(gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])) as writer:
        _add_fields(writer, network)
        data_bytes = 0
        for entry in entries:
            size = gguf.quant_shape_to_byte_shape(entry.shape, entry.form)
            num_bytes = int(np.prod(size))
            writer.add_tensor_info(entry.name, size, np.dtype(np.uint8), num_bytes, raw_dtype=entry.form)
            data_bytes += writer.ggml_pad(num_bytes, writer.data_alignment)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        described = path.stat().st_size
        _refuse_full_disk(writer.ggml_pad(described, writer.data_alignment) - described + data_bytes, path)
        for entry in tqdm(entries, desc=f"Writing {path.name}", leave=False, disable=None):
            data = gguf.quants.quantize(entry.read().float().contiguous().numpy(), entry.form)
            writer.write_tensor_data(data.view(np.uint8))


def _refuse_full_disk(num_bytes: int, path: Path) -> None:
    """Raise CapacityError if the disk lacks space for the file."""
    free = shutil.disk_usage(path.parent).free
    if num_bytes > free:
        raise CapacityError(
            f"--peers llama.cpp: its file takes {num_bytes:,} bytes more, and the disk of {random_models()} "
            f"has {free:,} free; make room, such as by deleting earlier *.gguf there, or leave it out",
            field="peers",
        )


def refuse_unlike(network: NetworkSpec) -> None:
    """Refuse a network that llama.cpp implements differently, or that this module does not support."""
    odd = ""
    if network.family not in ARCHITECTURES:
        odd = f"the family {network.family} is not written for it yet, only {' and '.join(ARCHITECTURES)}"
    elif any(not isinstance(layer.ffn, MLP) for layer in network.layers):
        odd = "experts are not written for it yet"
    elif any(
        isinstance(m, Attention) and (m.window or (m.rope and m.rope.scaling)) for m in network.mixers()
    ):
        odd = "sliding attention and scaled rotary frequencies are not written for it yet"
    elif any(isinstance(m, GatedDeltaNet) and m.key_dim != m.value_dim for m in network.mixers()):
        odd = "it has one size for keys and values of a delta net, and here they differ"
    if odd:
        raise ConfigError(f"--peers llama.cpp: {odd}; leave it out", field="peers")


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    form: "GGMLQuantizationType"
    read: Callable[[], Tensor]


def _entries(checkpoint: Checkpoint, network: NetworkSpec, kind: FileType) -> Iterator[GgufEntry]:
    import gguf

    blocks = len(network.layers) + len(network.mtp)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[network.family]], blocks)
    names = frozenset(checkpoint.names())
    table = layout(network)
    orders = _head_orders(network)
    unknown = []
    for disk in sorted(table.wanted(names, mtp=bool(network.mtp))):
        bare = disk.removeprefix(table.prefix(names)).removeprefix("language_model.")
        name = _name(bare, len(network.layers), known)
        if name is None:
            unknown.append(disk)
            continue
        shape = checkpoint.shape(disk)
        if bare.endswith("conv1d.weight"):
            shape = (shape[0], shape[-1])
        form = gguf.GGMLQuantizationType[_form(bare, shape, kind, checkpoint.dtype(disk))]
        yield GgufEntry(name, shape, form, _reader(checkpoint, disk, bare, network, orders))
    if unknown:
        raise ConfigError(
            f"--peers llama.cpp: its file has no place for {few(unknown)} of this model; leave it out",
            field="peers",
        )


def _name(bare: str, layers: int, known: "TensorNameMap") -> str | None:
    """Translate a tensor's name, given without the body's prefix."""
    if bare.startswith("mtp."):
        bare = bare.removeprefix("mtp.")
        if bare in HEAD:
            return f"blk.{layers}.{HEAD[bare]}"
        bare = re.sub(r"^layers\.(\d+)", lambda found: f"layers.{layers + int(found[1])}", bare)
    full = bare if bare == "lm_head.weight" else f"model.{bare}".replace("dt_bias", "dt_proj.bias")
    name: str | None = known.get_name(full, try_suffixes=(".weight", ".bias"))
    return name


def _form(bare: str, shape: tuple[int, ...], kind: FileType, stored: torch.dtype) -> str:
    """Return a tensor's type in the file: quantized where this engine quantizes it."""
    if len(shape) < 2 or bare.endswith("conv1d.weight"):
        return "F32"
    if kind not in ("Q8_0", "Q4_0"):
        return kind
    if bare.endswith(GATES):
        return "F32" if stored == torch.float32 else "BF16"
    if shape[-1] % GROUP:
        raise ConfigError(
            f"--peers llama.cpp: {kind} rounds {GROUP} numbers together, and the rows of {bare} have "
            f"{shape[-1]}; leave --quantize out, or choose another shape",
            field="peers",
        )
    return "Q8_0" if bare in LOGITS else kind


def _reader(
    checkpoint: Checkpoint,
    disk: str,
    bare: str,
    network: NetworkSpec,
    orders: Mapping[str, tuple[int, Tensor]],
) -> Callable[[], Tensor]:
    """Return a function that loads a tensor and converts it to llama.cpp's layout."""
    _, of_delta_net, part = bare.rpartition("linear_attn.")
    normed = bare.endswith("norm.weight") or ".pre_fc_norm" in bare
    offset = network.norm.offset if normed and not of_delta_net else 0.0

    def read() -> Tensor:
        tensor = checkpoint.tensor(disk)
        if part == "conv1d.weight":
            tensor = tensor.squeeze(1)
        if part in orders:
            dim, order_N = orders[part]
            tensor = tensor.index_select(dim, order_N)
        if part == "A_log":
            return -tensor.float().exp()
        return tensor.float() + offset if offset else tensor

    return read


def _head_orders(network: NetworkSpec) -> dict[str, tuple[int, Tensor]]:
    """Return the axis and order of value heads in the tensors of a delta net.

    transformers stores the value heads of a key head next to each other; llama.cpp cycles through the key
    heads.
    """
    net = next((mixer for mixer in network.mixers() if isinstance(mixer, GatedDeltaNet)), None)
    if net is None:
        return {}
    heads_N = torch.arange(net.value_heads).view(net.key_heads, -1).T.reshape(-1)
    values_N = torch.arange(net.value_heads * net.value_dim).view(net.value_heads, -1)[heads_N].reshape(-1)
    keys = 2 * net.key_heads * net.key_dim
    channels_N = torch.cat([torch.arange(keys), keys + values_N])
    return {
        "in_proj_qkv.weight": (0, channels_N),
        "conv1d.weight": (0, channels_N),
        "in_proj_z.weight": (0, values_N),
        "out_proj.weight": (1, values_N),
        "in_proj_a.weight": (0, heads_N),
        "in_proj_b.weight": (0, heads_N),
        "A_log": (0, heads_N),
        "dt_bias": (0, heads_N),
    }


def _add_fields(writer: "GGUFWriter", network: NetworkSpec) -> None:
    """Write the network's metadata, and a vocabulary of numbers."""
    layers = (*network.layers, *network.mtp)
    mixers = [layer.mixers[0] for layer in layers]
    full = next(mixer for mixer in mixers if isinstance(mixer, Attention))
    ffn = network.layers[0].ffn
    assert isinstance(ffn, MLP) and full.rope
    writer.add_name("specdec benchmark")
    writer.add_block_count(len(layers))
    writer.add_context_length(network.max_length)
    writer.add_embedding_length(network.hidden)
    writer.add_feed_forward_length(ffn.width)
    writer.add_head_count(full.heads)
    writer.add_head_count_kv(full.kv_heads)
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_layer_norm_rms_eps(network.norm.eps)
    writer.add_rope_freq_base(full.rope.theta)
    writer.add_rope_dimension_count(full.rope.dim)
    if network.mtp:
        writer.add_nextn_predict_layers(len(network.mtp))
    recurrent = [isinstance(mixer, GatedDeltaNet) for mixer in mixers]
    if net := next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaNet)), None):
        pairs = full.rope.dim // 2
        # A text token's three positions are equal: any sections that cover all pairs are right.
        writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
        writer.add_ssm_conv_kernel(net.conv)
        writer.add_ssm_state_size(net.key_dim)
        writer.add_ssm_group_count(net.key_heads)
        writer.add_ssm_time_step_rank(net.value_heads)
        writer.add_ssm_inner_size(net.value_heads * net.value_dim)
        writer.add_full_attention_interval(recurrent.index(False) + 1)
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    # Of llama.cpp's tokenizer types, this one requires no token except the line feed.
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([r"\n", *(f"<{i}>" for i in range(1, network.vocab))])
