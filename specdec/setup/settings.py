"""Resolved settings of an engine."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from specdec.config.engine import EngineConfig
from specdec.draft.proposal import DraftShape
from specdec.models.formats import FORMATS, WeightFormat
from specdec.state_slots.layout import Layout

AS_GIVEN = (
    *("max_running", "chunk_tokens", "adaptive", "draft_noise", "slots", "draft_vocab", "draft_window"),
    *("prefix_cache", "prefix_policy", "host_cache_bytes"),
)
"""Settings used as given."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Resolved settings of an engine; of `config` only the fields in `AS_GIVEN` are used directly."""

    config: EngineConfig
    """The given configuration."""
    device: torch.device
    dtype: torch.dtype
    kernels: str
    quantize: str | None
    """Format that large matrices are quantised to at load, by name."""
    weights: str | None
    """Format in which large matrices are stored; None: all in `dtype`."""
    layout: Layout
    weight_bytes: int
    """Bytes of the weights as stored."""
    memory_bytes: int
    max_model_len: int
    drafters: tuple[str, ...]
    """Drafters by name; may be empty."""
    bounds: DraftShape
    """The largest draft."""
    synthetic: tuple[float, ...] | None
    """Fixed acceptance rates by depth; None: drafts are verified."""
    graphs: bool = False
    """Whether all-decode steps run on the device, captured on a GPU."""
    prefix_alpha: float = 0.0
    """Eviction weight of the work a prefix saves, relative to recency; the initial one if tuned."""

    @property
    def weight_format(self) -> WeightFormat | None:
        """Format of quantised or 8-bit float matrices, or None."""
        return FORMATS.get(self.weights) if self.weights else None

    def named(self) -> dict[str, Any]:
        """Return all settings by name."""
        names = [field.name for field in fields(self) if field.name != "config"]
        values = {name: getattr(self, name) for name in names}
        return values | {name: getattr(self.config, name) for name in AS_GIVEN}

    def __str__(self) -> str:
        """Format one setting per line."""
        values = self.named()
        values["layout"] = ", ".join(
            f"{name} {value:,}" for name, value in asdict(self.layout.describe()).items()
        )
        values |= {name: f"{values[name]:,}" for name in ("weight_bytes", "memory_bytes")}
        values["drafters"] = ", ".join(self.drafters) or "none"
        return "".join(f"\n  {name}: {value}" for name, value in values.items())
