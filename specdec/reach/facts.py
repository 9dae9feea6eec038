"""What two engines must have in common before one reads the other's memory: the fingerprint is of these."""

import hashlib
from pathlib import Path

from specdec.setup.settings import Resolved

LOOK_UPS = {"ngram", "suffix"}
"""Drafters that keep nothing in blocks and states: each engine may have its own."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Parts of each file of weights that are looked at: reading all of them would take minutes."""


def facts_of(folder: Path, settings: Resolved) -> dict[str, str]:
    """Name the model, its weights, how they are kept, the head that drafts, and how memory is laid out."""
    head = settings.config.draft_model
    return {
        "config.json": _digest((folder / "config.json").read_bytes()),
        "weights": _weights(folder),
        "draft_model": _weights(Path(head)) if head else "none",
        "draft head": ", ".join(own for own in settings.drafters if own not in LOOK_UPS) or "none",
        "quantize": settings.quantize or "none",
        "weight format": settings.weights or "none",
        "dtype": str(settings.dtype),
        "kv_dtype": str(settings.layout.page_dtype),
        "state_dtype": str(settings.layout.state_dtype),
        "block_tokens": str(settings.layout.block_tokens),
        "layout": _digest(repr(settings.layout).encode()),
    }


def _weights(folder: Path) -> str:
    """Digest files of weights by their names, sizes, headers and samples of their bytes."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            found.update(file.read(min(header, size)))
            for sample in range(SAMPLES):
                file.seek(8 + header + (size - header) * sample // SAMPLES)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
