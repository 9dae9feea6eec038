"""Registry of drafters: requirements and constructors."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from specdec.config.drafters import DRAFTER_OPTIONS
from specdec.config.engine import EngineConfig
from specdec.core.speculation import Speculation
from specdec.draft.block import BlockDrafter, DraftBlock
from specdec.draft.drafter import Drafter
from specdec.draft.head import DraftHead, HeadDrafter, UnrolledDrafting
from specdec.draft.ngram import NgramDrafter
from specdec.draft.rounded import QuantisedCopy, RoundedDrafter
from specdec.draft.suffix import SuffixDrafter
from specdec.models import families, spec
from specdec.models.heads import HeadSource, find_block, find_eagle, find_mtp
from specdec.models.unrolled import Unrolled
from specdec.setup.refusal import Refusal
from specdec.setup.settings import Resolved
from specdec.state_slots.arena import Arena


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """Components for building a drafter."""

    head: DraftHead | None
    """Its head, or None."""
    copy: QuantisedCopy | None
    """The quantised copy that drafts, or None."""
    arena: Arena
    speculation: Speculation
    settings: Resolved


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter's constructor and requirements; `config/drafters.py` has its user description."""

    make: Callable[[DrafterContext], Drafter]
    find_head: Callable[[Path | None, spec.NetworkSpec, EngineConfig], HeadSource | None] | None = None
    """Finds its head in a model's folder (None: random weights); None for drafters without a head."""
    missing: Refusal | None = None
    """Refusal if its head is missing."""
    has_copy: bool = False
    """Whether a quantised copy of the network drafts."""
    host_only: Refusal | None = None
    """Refusal with device steps, if any."""
    lacking: tuple[str, ...] = ()
    """Families whose checkpoints never contain its head."""
    runs_on_device: bool = False
    """Whether it drafts on the device in device steps."""
    in_auto: bool = False
    """Whether `auto` uses it, with or without a head."""

    @property
    def has_head(self) -> bool:
        return self.find_head is not None

    @property
    def has_weights(self) -> bool:
        """Whether it runs a network, and so always drafts."""
        return self.has_head or self.has_copy


NO_HEAD = Refusal(
    "draft",
    "'mtp' needs the model's own multi-token head, and this checkpoint holds no mtp.* tensors",
    "use draft='suffix' or 'auto'",
)
NO_EAGLE = Refusal(
    "draft_model",
    "draft='eagle' needs the folder of an EAGLE head, and the model's own folder holds none called eagle3 or "
    "eagle",
    "give draft_model=FOLDER, or use draft='auto'",
)
NO_BLOCK = Refusal(
    "draft_model",
    "draft='block' needs the folder of a DFlash or DSpark head, and the model's own holds none called dflash",
    "give draft_model=FOLDER, or use draft='auto'",
)
SELF_ON_DEVICE = Refusal(
    "graphs",
    "draft='self-int4' drafts on the host, from states that are the device's there",
    "use graphs=False, or another drafter",
)
SELF_ON_GPU = Refusal("draft", "'self-int4' runs on CPU kernels only", "use draft='auto', or a CPU")
SELF_IS_PACKED = Refusal(
    "draft",
    "'self-int4' would be the model itself, whose weights are published in 4 bits",
    "use another drafter",
)
SELF_IS_TARGET = Refusal(
    "draft",
    "'self-int4' would be the model itself, whose weights quantize='int4' has rounded already",
    "use quantize='int8', or another drafter",
)


def _head_drafter(context: DrafterContext) -> HeadDrafter:
    head, settings = context.head, context.settings
    assert head is not None
    ranker = context.speculation.ranker
    return HeadDrafter(
        head,
        context.arena,
        ranker.rank,
        settings.device,
        settings.config.chunk_tokens,
        window=settings.config.draft_window,
        straight=UnrolledDrafting(Unrolled(head, ranker.kernels), ranker.goes_straight, ranker.rules),
    )


def _block_drafter(context: DrafterContext) -> BlockDrafter:
    head, settings = cast(DraftBlock, context.head), context.settings
    return BlockDrafter(
        head,
        context.arena,
        context.speculation.ranker.rank,
        settings.device,
        settings.config.chunk_tokens,
        window=settings.config.draft_window,
    )


def _rounded_drafter(context: DrafterContext) -> RoundedDrafter:
    assert context.copy is not None
    rank, device = context.speculation.ranker.rank, context.settings.device
    return RoundedDrafter(context.copy, context.arena, rank, device)


DRAFTERS: dict[str, DrafterSpec] = {
    "mtp": DrafterSpec(_head_drafter, find_mtp, NO_HEAD, lacking=families.HEADLESS, runs_on_device=True),
    "eagle": DrafterSpec(_head_drafter, find_eagle, NO_EAGLE, runs_on_device=True),
    "block": DrafterSpec(_block_drafter, find_block, NO_BLOCK, runs_on_device=True),
    "ngram": DrafterSpec(lambda _: NgramDrafter()),
    "suffix": DrafterSpec(lambda _: SuffixDrafter(), in_auto=True),
    "self-int4": DrafterSpec(_rounded_drafter, has_copy=True, host_only=SELF_ON_DEVICE),
}
"""By user-visible name, in the order of `config/drafters.py`."""

assert list(DRAFTERS) == list(DRAFTER_OPTIONS), "config/drafters.py and this table name the same drafters"


def find_heads(folder: Path | None, network: spec.NetworkSpec, config: EngineConfig) -> dict[str, HeadSource]:
    """Return the available heads for a network, by drafter name."""
    finders = {name: entry.find_head for name, entry in DRAFTERS.items() if entry.find_head}
    heads = ((name, find(folder, network, config)) for name, find in finders.items())
    return {name: head for name, head in heads if head}


def auto_drafters(heads: Collection[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the head that `auto` selects, preferring one in a separate folder, and the other drafters."""
    head = min(heads, key=lambda name: not DRAFTER_OPTIONS[name].reads_folder, default=None)
    return head, tuple(name for name, entry in DRAFTERS.items() if entry.in_auto)


def head_of(drafters: Collection[str], heads: Mapping[str, HeadSource]) -> HeadSource | None:
    """Return the head of these drafters, of which at most one has any."""
    return next((heads[name] for name in drafters if name in heads), None)


def has_head(drafters: Collection[str]) -> bool:
    """Return whether one of these drafters has a head."""
    return any(DRAFTERS[name].has_head for name in drafters)


def has_weights(drafters: Collection[str]) -> bool:
    """Return whether one of these drafters runs a network."""
    return any(DRAFTERS[name].has_weights for name in drafters)


def has_copy(drafters: Collection[str]) -> bool:
    """Return whether a quantised copy of the network drafts."""
    return any(DRAFTERS[name].has_copy for name in drafters)


def quoted_heads() -> str:
    """Return the drafters with a head, quoted for an error message."""
    return " or ".join(repr(name) for name, entry in DRAFTERS.items() if entry.has_head)
