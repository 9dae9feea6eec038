"""What an engine runs with, once every "auto" is resolved."""

from dataclasses import asdict, dataclass, fields

import torch

from specdec.draft.proposal import Shape
from specdec.state_slots.layout import Layout


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an engine runs with; nothing in it is "auto"."""

    device: torch.device
    dtype: torch.dtype
    kernels: str
    quantize: bool
    """Large matrices that are not stored in eight bits are rounded to them."""
    narrow: bool
    """Large matrices are kept in eight bits."""
    layout: Layout
    memory_bytes: int
    max_running: int
    max_model_len: int
    chunk_tokens: int
    drafters: tuple[str, ...]
    """The drafters by name; none where this is empty."""
    bounds: Shape
    """The largest draft."""
    adaptive: bool
    draft_noise: bool
    slots: str
    synthetic: tuple[float, ...] | None
    """Rates by depth at which drafts are accepted whatever they say."""
    graphs: bool = False
    """Whether steps in which every row decodes are the device's to decide, captured where it is a GPU."""
    draft_vocab: int | None = None
    """How many tokens a head drafts; None: all."""
    draft_window: int | None = None
    """How many tokens a head's attention looks back; None: to the first."""
    prefix_cache: bool = False
    """Whether what requests have read is kept for those that begin alike."""
    prefix_policy: str = "tuned"
    prefix_alpha: float = 0.0
    """What the work that a prefix saves counts beside how recently it was used, at first if that is tuned."""
    host_cache_bytes: int = 0
    """Memory of the host for prefixes that are evicted."""

    def __str__(self) -> str:
        """Show one setting a line."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        named["layout"] = ", ".join(
            f"{name} {value:,}" for name, value in asdict(self.layout.describe()).items()
        )
        named["memory_bytes"] = f"{self.memory_bytes:,}"
        named["drafters"] = ", ".join(self.drafters) or "none"
        return "".join(f"\n  {name}: {value}" for name, value in named.items())
