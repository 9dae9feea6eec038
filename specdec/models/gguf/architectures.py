"""Present a GGUF file as the checkpoint it was converted from: config.json fields and tensors."""

import re
from collections.abc import Iterator, Mapping
from copy import copy
from math import prod
from typing import Any

from specdec.models.gguf import delta_net, dense, latent, lightning, mamba, nemotron, short_conv
from specdec.models.gguf.architecture import Architecture, Recipe, named
from specdec.models.gguf.blocks import KEPT, IntegerFormat, bits_per_weight, widen
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
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            self.file = file
            known, found = ", ".join(ARCHITECTURES), str(name)[:80]
            self.refuse("general.architecture", f"the architectures {known}, and not {found!r}")
        self.architecture = ARCHITECTURES[name]
        super().__init__(file)
        self.file = copy(file)
        self.file.entries = dict(self._split_experts(file.entries))
        self._names: dict[str, str] = {}
        for own in self.file.entries:
            if own == "rope_freqs.weight":  # read with the metadata
                continue
            if (other := self._names.setdefault(self._disk(own), own)) != own:
                self.refuse(own, f"one of {own} and {other}, not both")

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

    def form(self, disk: str, entry: GgufTensor) -> IntegerFormat | None:
        """Return a matrix's integer format; None: it is widened."""
        if len(entry.shape) != 2 or (self.names()[disk] == _EMBEDDING and not self.is_tied):
            return None
        if not self.architecture.keeps(self, disk) or self._unlike(disk, entry):
            return None
        return KEPT.get(entry.kind.name)

    @property
    def is_tied(self) -> bool:
        """True if the embedding is also the output matrix."""
        return "output.weight" not in self.file.entries

    def _unlike(self, disk: str, entry: GgufTensor) -> bool:
        """Return whether an expert's gate and up projections, which are stacked, differ in format."""
        name = self.names()[disk]
        other = re.sub("ffn_(gate|up)_exps", lambda own: f"ffn_{_OTHER[own[1]]}_exps", name)
        beside = self.file.entries.get(other)
        return beside is not None and KEPT.get(beside.kind.name) != KEPT.get(entry.kind.name)

    def _integer_weights(self) -> dict[str, Any]:
        """Return the config's announcement of matrices that stay integers."""
        types: dict[str, list[str]] = {}
        for disk, name in self.names().items():
            if self.form(disk, entry := self.file.entries[name]):
                types.setdefault(entry.kind.name, []).append(disk.removesuffix(".weight"))
        if not types:
            return {}
        return {"quantization_config": {"quant_method": "gguf", "types": types, "note": self._note()}}

    def _note(self) -> str:
        """Describe matrices that need much more memory than in the file; empty if there are none."""
        stored, taken, names = 0.0, 0.0, set()
        for disk, name in self.names().items():
            entry = self.file.entries[name]
            if len(entry.shape) != 2 or self.names()[disk] == _EMBEDDING:
                continue
            numbers, bits = prod(entry.shape), bits_per_weight(self.form(disk, entry))
            if numbers * bits > NOTED * 8 * entry.bytes:
                stored, taken = stored + entry.bytes, taken + numbers * bits / 8
                names.add(entry.kind.name)
        told = f"{', '.join(sorted(names))} matrices of {stored / 1e9:.2f} GB take {taken / 1e9:.2f} GB"
        return f"{told}: no kernel multiplies their bits as stored" if names else ""

    def recipe(self, disk: str) -> Recipe | None:
        """Return the transform from the file's tensor to the checkpoint's, or None."""
        return self.architecture.recipe(self, disk)

    def _split_experts(self, entries: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
        """Yield a file's tensors, with one matrix per expert, as checkpoints have them."""
        for name, entry in entries.items():
            weight, _, end = name.rpartition(".")
            if end in ("scale", "input_scale") and f"{weight}.weight" in entries:
                continue
            found, factors = _EXPERTS.fullmatch(name), self._factors(entries.get(f"{weight}.scale"), weight)
            if found is None or len(entry.shape) != 3:
                yield name, entry._replace(factor=factors[0])
                continue
            count, rows, width = entry.shape
            parts = ("gate", "up") if found[2] == "gate_up" else (found[2],)
            if count != self.experts or rows % len(parts):
                self.refuse(name, f"{name} of {self.experts} experts, as expert_count says")
            each = entry._replace(shape=(rows // len(parts), width))
            for i in range(count * len(parts)):
                own = f"{found[1]}{parts[i % len(parts)]}_exps.{i // len(parts)}.weight"
                factor = factors[min(i // len(parts), len(factors) - 1)]
                yield own, each._replace(offset=entry.offset + i * each.bytes, factor=factor)

    def _factors(self, entry: GgufTensor | None, weight: str) -> list[float]:
        """Read the scale of a whole matrix or of each expert, which NVFP4 stores separately."""
        if entry is None:
            return [1.0]
        found = widen(entry.data, entry.kind, entry.shape).flatten()
        if len(found) not in (1, self.experts) or not found.isfinite().all():
            self.refuse(f"{weight}.scale", f"one finite number, or one for each expert, as {weight}.scale")
        return [float(own) for own in found]

    def _disk(self, name: str) -> str:
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


NOTED = 1.5
"""Ratio of memory to file size that is worth a log line."""
_EMBEDDING = "token_embd.weight"
_OTHER = {"gate": "up", "up": "gate"}
_EXPERTS = re.compile(r"(blk\.\d{1,4}\.ffn_)(gate_up|gate|up|down)_exps\.weight")
"""One tensor with the matrices of all experts of a layer."""
_NAME = re.compile(r"blk\.(\d{1,4})\.(.+?)(?:\.(\d+))?(\.weight|\.bias|)")
"""Block, tensor, expert number and suffix."""
