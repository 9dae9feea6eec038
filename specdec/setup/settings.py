"""What an engine runs with, once every "auto" is resolved."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from specdec.config.engine import EngineConfig
from specdec.draft.proposal import Shape
from specdec.models.formats import FORMATS, WeightFormat
from specdec.state_slots.layout import Layout

AS_GIVEN = (
    *("max_running", "chunk_tokens", "adaptive", "draft_noise", "slots", "draft_vocab", "draft_window"),
    *("prefix_cache", "prefix_policy", "host_cache_bytes"),
)
"""The settings that hold as they were given."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an engine runs with; nothing in it is "auto", but what `config` holds beside `AS_GIVEN`."""

    config: EngineConfig
    """What was asked for, some of which holds as it was given."""
    device: torch.device
    dtype: torch.dtype
    kernels: str
    quantize: str | None
    """What large matrices are rounded to as they are loaded, by the format's name."""
    weights: str | None
    """The format that large matrices are kept in; None: all are in `dtype`."""
    layout: Layout
    weight_bytes: int
    """What the weights take, as they are kept."""
    memory_bytes: int
    max_model_len: int
    drafters: tuple[str, ...]
    """The drafters by name; none where this is empty."""
    bounds: Shape
    """The largest draft."""
    synthetic: tuple[float, ...] | None
    """Rates by depth at which drafts are accepted whatever they say."""
    graphs: bool = False
    """Whether steps in which every row decodes are the device's to decide, captured where it is a GPU."""
    prefix_alpha: float = 0.0
    """What the work that a prefix saves counts beside how recently it was used, at first if that is tuned."""

    @property
    def weight_format(self) -> WeightFormat | None:
        """Return what large matrices are rounded to, or stored in as 8-bit floats."""
        return FORMATS.get(self.weights) if self.weights else None

    def named(self) -> dict[str, Any]:
        """Return every setting by its name."""
        own = [field.name for field in fields(self) if field.name != "config"]
        held = {name: getattr(self, name) for name in own}
        return held | {name: getattr(self.config, name) for name in AS_GIVEN}

    def __str__(self) -> str:
        """Show one setting a line."""
        named = self.named()
        named["layout"] = ", ".join(
            f"{name} {value:,}" for name, value in asdict(self.layout.describe()).items()
        )
        named |= {name: f"{named[name]:,}" for name in ("weight_bytes", "memory_bytes")}
        named["drafters"] = ", ".join(self.drafters) or "none"
        return "".join(f"\n  {name}: {value}" for name, value in named.items())
