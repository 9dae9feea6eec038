"""What two engines must have in common before one reads the other's memory: the facts of the fingerprint."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from specdec.models import spec
from specdec.models.files import INDEX, SINGLE
from specdec.setup.drafters import find_heads
from specdec.setup.settings import Resolved
from specdec.state_slots.transfer.cut import Cut

SAMPLES = 4096
"""Tensors of a file of which the first bytes are read, evenly spread over it."""
SAMPLE_BYTES = 256
DIGITS = 16
"""Of a digest that is shown to people; the fingerprint is of all facts together."""


def facts_of(folder: Path, network: spec.Network, settings: Resolved) -> dict[str, str]:
    """Describe an engine in words that are compared and shown."""
    heads = find_heads(folder, network, settings.config)
    head = next((heads[name] for name in settings.drafters if name in heads), None)
    if head is None:
        drafts = "none"
    else:
        drafts = digest_checkpoint(head.checkpoint.folder) if head.checkpoint else "in the model"
    layout = asdict(Cut.of(settings.layout))
    return {
        "model": digest_checkpoint(folder),
        "draft head": drafts,
        "quantize": settings.config.quantize or "none",  # rounded, also where they are widened again
        "weights": settings.weights or "none",
        **{f"layout.{name}": _shown(value) for name, value in layout.items()},
    }


def digest_checkpoint(folder: Path) -> str:
    """Hash a checkpoint's config, its files' headers, and the first bytes of its tensors.

    Models of one shape have the same headers: a few bytes of each tensor tell one from another that was
    trained on, without reading all of both.
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
    """Return where tensors begin, in order; of a limited number."""
    starts = sorted(own["data_offsets"][0] for own in header.values() if "data_offsets" in own)
    return starts[:: -(-len(starts) // SAMPLES) or 1]


def _shown(value: object) -> str:
    """Return a short value as it is, and a list of layers as what is the same for equal ones."""
    text = json.dumps(value)
    return text.strip('"') if len(text) <= 40 else hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
