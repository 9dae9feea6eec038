"""Present a GGUF file as the checkpoint it was converted from: config.json fields and tensors."""

import re
from collections.abc import Iterator, Mapping
from copy import copy
from math import prod
from typing import Any

from specdec.models.fields import Fields
from specdec.models.gguf import delta_net, dense, latent, lightning, mamba, nemotron, short_conv
from specdec.models.gguf.architecture import Architecture, BoundTransform, named
from specdec.models.gguf.blocks import widen
from specdec.models.gguf.file import GgufFile, GgufTensor
from specdec.models.gguf.metadata import Metadata

ARCHITECTURES: Mapping[str, Architecture] = {
    **dense.ARCHITECTURES,
    **delta_net.ARCHITECTURES,
    **short_conv.ARCHITECTURES,
    **mamba.ARCHITECTURES,
    **nemotron.ARCHITECTURES,
    **latent.ARCHITECTURES,
    **lightning.ARCHITECTURES,
}
"""By the files' architecture name."""


class DescribedFile(Metadata):
    """One file's config and tensors, as a checkpoint has them."""

    def __init__(self, file: GgufFile) -> None:
        fields = Fields(file.metadata, file=file.path.name)
        if fields.string("general.type", "model") != "model":
            fields.refuse("general.type", "'model'")
        if (name := fields.string("general.architecture")) not in ARCHITECTURES:
            fields.refuse("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
        self.architecture = ARCHITECTURES[name]
        super().__init__(file)
        self.file = copy(file)
        self.file.entries = {}
        for own, entry in self._split_experts(file.entries):
            if own in self.file.entries:
                self.refuse(own, f"two tensors hold the matrix {own}")
            self.file.entries[own] = entry
        self._names: dict[str, str] = {}
        for own in self.file.entries:
            if own == "rope_freqs.weight":  # read with the metadata
                continue
            if (other := self._names.setdefault(self._checkpoint_name(own), own)) != own:
                self.refuse(own, f"{own} and {other} are the same tensor of a checkpoint")

    @property
    def dtype(self) -> str:
        """Return the checkpoint's assumed dtype, as safetensors spells it."""
        return "F32" if {own.kind.name for own in self.file.entries.values()} == {"F32"} else "BF16"

    @property
    def config(self) -> dict[str, Any]:
        """Return the fields of config.json."""
        width = max(self.by_layer("feed_forward_length", 0))
        config = {
            "model_type": self.architecture.model_type,
            "dtype": "float32" if self.dtype == "F32" else "bfloat16",
            "vocab_size": self.entry(_EMBEDDING).shape[0],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            **(self._attention() if self.heads else {}),
            **({"intermediate_size": width} if width else {}),
            "max_position_embeddings": self.integer("context_length"),
            "rms_norm_eps": self.eps(),
            "tie_word_embeddings": self.is_tied,
            **self.architecture.config(self),
            **self._integer_weights(),
        }
        value = self.integer("attention.value_length", default=self.head_dim)
        if self.heads and config["head_dim"] not in (None, value):
            self.refuse_value("attention.value_length", f"{self.head_dim}, as attention.key_length")
        self.refuse_unread()
        return config

    def _attention(self) -> dict[str, Any]:
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": max(self.kv_heads) or self.heads,
            "head_dim": self.head_dim,
            "rope_parameters": self.rope(),
        }

    def names(self) -> Mapping[str, str]:
        """Return the file's tensor names by checkpoint name."""
        return self._names

    def keeps_integers(self, checkpoint_name: str, entry: GgufTensor) -> bool:
        """Return whether a matrix stays integers; others are widened."""
        if len(entry.shape) != 2 or (self.names()[checkpoint_name] == _EMBEDDING and not self.is_tied):
            return False
        can_keep = bool(entry.kind.bits) and self.architecture.keeps(self, checkpoint_name)
        return can_keep and not self._unlike(checkpoint_name, entry)

    @property
    def is_tied(self) -> bool:
        """True if the embedding is also the output matrix."""
        return "output.weight" not in self.file.entries

    def _unlike(self, checkpoint_name: str, entry: GgufTensor) -> bool:
        """Return whether an expert's gate and up projections, which are stacked, differ in format."""
        name = self.names()[checkpoint_name]
        other = re.sub("ffn_(gate|up)_exps", lambda own: f"ffn_{_OTHER[own[1]]}_exps", name)
        beside = self.file.entries.get(other)
        return beside is not None and beside.kind.memory_format != entry.kind.memory_format

    def _integer_weights(self) -> dict[str, Any]:
        """Return the config's announcement of matrices that stay integers."""
        types: dict[str, list[str]] = {}
        for checkpoint_name, name in self.names().items():
            if self.keeps_integers(checkpoint_name, entry := self.file.entries[name]):
                types.setdefault(entry.kind.name, []).append(checkpoint_name.removesuffix(".weight"))
        if not types:
            return {}
        return {"quantization_config": {"quant_method": "gguf", "types": types, "note": self._note()}}

    def _note(self) -> str:
        """Describe matrices that need much more memory than in the file; empty if there are none."""
        stored, taken, names = 0.0, 0.0, set()
        for checkpoint_name, name in self.names().items():
            entry = self.file.entries[name]
            if len(entry.shape) != 2 or self.names()[checkpoint_name] == _EMBEDDING:
                continue
            numbers = prod(entry.shape)
            bits = entry.kind.bits_per_weight if self.keeps_integers(checkpoint_name, entry) else 16
            if numbers * bits > NOTED * 8 * entry.bytes:
                stored, taken = stored + entry.bytes, taken + numbers * bits / 8
                names.add(entry.kind.name)
        told = f"{', '.join(sorted(names))} matrices of {stored / 1e9:.2f} GB take {taken / 1e9:.2f} GB"
        return f"{told}: no kernel multiplies their bits as stored" if names else ""

    def transform(self, checkpoint_name: str) -> BoundTransform | None:
        """Return the transform from the file's tensor to the checkpoint's, or None."""
        return self.architecture.transform(self, checkpoint_name)

    def _split_experts(self, entries: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the tensors of the model and of its first head, with one matrix per expert."""
        split = 0
        for name, entry in entries.items():
            weight, _, end = name.rpartition(".")
            if end in ("scale", "input_scale") and f"{weight}.weight" in entries:
                continue
            if (block := self.block(name)) is not None and block > self.layers:
                continue
            stacked = _EXPERTS.fullmatch(name) if len(entry.shape) == 3 else None
            count = entry.shape[0] if stacked else 1
            if stacked and count != self.experts:
                self.refuse(name, f"{name} has {count} experts, and expert_count is {self.experts}")
            factors = self._factors(entries, f"{weight}.scale", count) if end == "weight" else [1.0]
            if stacked is None:
                yield name, entry._replace(factor=factors[0])
                continue
            _, rows, width = entry.shape
            parts = ("gate", "up") if stacked[2] == "gate_up" else (stacked[2],)
            if rows % len(parts):
                self.refuse(name, f"{name} holds gates and ups, and has an odd number of rows ({rows})")
            if (split := split + count * len(parts)) > MOST_MATRICES:
                self.refuse(name, f"its experts have more than {MOST_MATRICES:,} matrices")
            each = entry._replace(shape=(rows // len(parts), width))
            for i in range(count * len(parts)):
                own = f"{stacked[1]}{parts[i % len(parts)]}_exps.{i // len(parts)}.weight"
                factor = factors[min(i // len(parts), len(factors) - 1)]
                yield own, each._replace(offset=entry.offset + i * each.bytes, factor=factor)

    def _factors(self, entries: Mapping[str, GgufTensor], name: str, count: int) -> list[float]:
        """Read the scale of a whole matrix or of each of `count`, which NVFP4 stores separately."""
        if (entry := entries.get(name)) is None:
            return [1.0]
        if entry.shape not in ((1,), (count,)):
            needed = f"[1] or [{count}]" if count > 1 else "[1]"
            self.refuse(name, f"{name} has the shape {list(entry.shape)}, and should have {needed}")
        found = widen(entry.data, entry.kind, entry.shape)
        if not found.isfinite().all():
            self.refuse(name, f"{name} contains NaN or Inf")
        return [float(own) for own in found]

    def _checkpoint_name(self, name: str) -> str:
        if name in self.architecture.outer:
            return self.architecture.outer[name]
        found = _NAME.fullmatch(name)
        if found is None:
            return name
        block, stem, suffix = int(found[1]), found[2], found[4]
        architecture, where = self.architecture, f"model.layers.{block}."
        own = named(architecture.names, stem, suffix)
        if block >= self.layers:
            where = f"mtp.layers.{block - self.layers}."
            if whole := named(architecture.head, stem, suffix):
                own, where = whole, ""
        return where + (own or stem + suffix).replace("{e}", found[3] or "")


MOST_MATRICES = 1 << 20
"""Maximum expert matrices of all layers together: a small file may claim many experts in many blocks."""
NOTED = 1.5
"""Ratio of memory to file size that is worth a log line."""
_EMBEDDING = "token_embd.weight"
_OTHER = {"gate": "up", "up": "gate"}
_EXPERTS = re.compile(r"(blk\.\d+\.ffn_)(gate_up|gate|up|down)_exps\.weight")
"""One tensor with the matrices of all experts of a layer."""
_NAME = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(\d+))?(\.weight|\.bias|)")
"""Block, tensor, expert number and suffix."""
