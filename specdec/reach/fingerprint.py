"""Facts that must be equal before one engine reads another's memory; the fingerprint covers them."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from specdec.models import spec
from specdec.models.files import INDEX, SINGLE
from specdec.setup.drafters import find_heads
from specdec.setup.settings import Resolved
from specdec.state_slots.transfer.model_layout import ModelLayout

SAMPLES = 4096
"""Maximum tensors per file whose first bytes are hashed, evenly spaced."""
SAMPLE_BYTES = 256
DIGITS = 16
"""Digits of a displayed digest; the fingerprint covers the full facts."""


def facts_of(folder: Path, network: spec.NetworkSpec, settings: Resolved) -> dict[str, str]:
    """Return an engine's facts as strings to compare and display."""
    heads = find_heads(folder, network, settings.config)
    head = next((heads[name] for name in settings.drafters if name in heads), None)
    if head is None:
        drafts = "none"
    else:
        drafts = digest_checkpoint(head.checkpoint.folder) if head.checkpoint else "in the model"
    layout = asdict(ModelLayout.of(settings.layout))
    return {
        "model": digest_checkpoint(folder),
        "draft head": drafts,
        "quantize": settings.config.quantize or "none",  # quantised, even if widened again
        "weights": settings.weights or "none",
        **{f"layout.{name}": _shown(value) for name, value in layout.items()},
    }


def digest_checkpoint(folder: Path) -> str:
    """Hash a checkpoint's config, its files' headers, and the first bytes of its tensors.

    Models of one shape have equal headers; a few bytes of each tensor distinguish a fine-tuned one without
    reading it all.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in _files(folder):
        with (folder / name).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(size)
            digest.update(header)
            for start in _sampled(json.loads(header)):
                file.seek(8 + size + start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:DIGITS]


def _files(folder: Path) -> list[str]:
    if (folder / SINGLE).exists():
        return [SINGLE]
    return sorted({*json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()})


def _sampled(header: dict[str, dict[str, list[int]]]) -> list[int]:
    """Return a bounded number of tensor offsets, in order."""
    starts = sorted(tensor["data_offsets"][0] for tensor in header.values() if "data_offsets" in tensor)
    return starts[:: -(-len(starts) // SAMPLES) or 1]


def _shown(value: object) -> str:
    """Return a short value as text, and a long one as its hash."""
    text = json.dumps(value)
    return text.strip('"') if len(text) <= 40 else hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
