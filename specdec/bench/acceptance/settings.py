"""Benchmark settings: drafter, shape, temperature and batch."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.config.drafters import AUTO, NONE, only_chains
from specdec.config.engine import EngineConfig
from specdec.draft.proposal import DraftShape
from specdec.errors import ConfigError
from specdec.setup.drafters import DRAFTERS
from specdec.setup.resolve import DEFAULT_STEPS, DEFAULT_TOKENS, DEFAULT_TOPK, bounds_of

TRANSFORMERS = "transformers"
NETWORKS = (AUTO, *(name for name, own in DRAFTERS.items() if own.has_weights))
"""Drafters that may run a network, whose guesses can be ranked with the noise or without."""
DEFAULT_BOUNDS = DraftShape(DEFAULT_STEPS, DEFAULT_TOPK, DEFAULT_TOKENS)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter and its shape; engines differ in nothing else."""

    draft: str
    shape: DraftShape | None = None
    """The draft's shape, or with `chosen` the largest; None: no drafting."""
    chosen: bool = False
    """Whether the loop adapts the shape within these bounds."""
    noise: bool = True
    """Whether a head's guesses are ranked with the target's sampling noise."""
    vocab: int | None = None
    """Number of the most frequent tokens that a head drafts from; None: all."""
    window: int | None = None
    """Number of last tokens that a head's attention sees; None: all."""

    @property
    def name(self) -> str:
        """Return the name used in the table: `mtp 4x1` is a chain of 4, `mtp 4x4:16` a tree of 16 tokens."""
        if self.shape is None:
            return self.draft
        steps, topk, tokens = self.shape.num_steps, self.shape.topk, self.shape.num_draft_tokens
        nodes = "" if tokens == steps + 1 and topk == 1 else f":{tokens}"
        words = [self.draft, "chosen" if self.chosen else f"{steps}x{topk}{nodes}"]
        words += [f"vocab {self.vocab}"] if self.vocab else []
        words += [f"window {self.window}"] if self.window else []
        return " ".join(words if self.noise else [*words, "plain"])

    def fields(self) -> dict[str, Any]:
        """Return the fields of EngineConfig."""
        if self.shape is None:
            return {"draft": self.draft}
        return {
            "draft": self.draft,
            "num_steps": self.shape.num_steps,
            "topk": self.shape.topk,
            "num_draft_tokens": self.shape.num_draft_tokens,
            "adaptive": self.chosen,
            "draft_noise": self.noise,
            "draft_vocab": self.vocab,
            "draft_window": self.window,
        }


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """The conditions that settings share when they take turns on the same prompts."""

    temperature: float
    batch: int

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Setting:
    drafting: Drafting
    group: SettingGroup

    @property
    def name(self) -> str:
        return self.drafting.name

    def describe(self) -> dict[str, Any]:
        """Return the setting's fields for reports."""
        shape = self.drafting.shape
        return {
            "draft": self.drafting.draft,
            "num_steps": shape.num_steps if shape else None,
            "topk": shape.topk if shape else None,
            "num_draft_tokens": shape.num_draft_tokens if shape else None,
            "temperature": self.group.temperature,
            "batch": self.group.batch,
            "chosen": self.drafting.chosen,
            "draft_noise": self.drafting.noise,
            "draft_vocab": self.drafting.vocab,
            "draft_window": self.drafting.window,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The settings to measure."""

    drafts: Sequence[str]
    shapes: Sequence[DraftShape]
    chosen: DraftShape | None
    """Also measure the adaptive choice within these bounds; None: do not."""
    temperatures: Sequence[float]
    batches: Sequence[int]
    noises: Sequence[str]
    """`shared`, `none` or both."""
    vocabs: Sequence[int | None] = (None,)
    windows: Sequence[int | None] = (None,)
    transformers: bool

    def groups(self) -> list[SettingGroup]:
        return [SettingGroup(*pair) for pair in itertools.product(self.temperatures, self.batches)]

    def settings(self, group: SettingGroup, draftings: Sequence[Drafting]) -> list[Setting]:
        """Return the settings that take turns in a group: `none` first, `transformers` last.

        At temperature 0 there is no noise to leave out. `transformers` runs only greedily with batch 1: it
        takes prompts of one length and does not share our noise.
        """
        heard = (replace(d, noise=d.noise or not group.temperature) for d in draftings)
        own = [Drafting(NONE), *dict.fromkeys(heard)]
        if self.transformers and group.batch == 1 and not group.temperature:
            own.append(Drafting(TRANSFORMERS))
        return [Setting(drafting, group) for drafting in own]

    def draftings(self) -> tuple[list[Drafting], list[str]]:
        """Return the draftings to measure beside `none`, and those left out with the reason."""
        found: dict[Drafting, None] = {}
        left_out: dict[str, None] = {}
        for drafting in self._requested():
            try:
                bounds_of(EngineConfig.of(None, drafting.fields()))
            except ConfigError as error:
                left_out[f"{drafting.name}: {error}"] = None
            else:
                found[drafting] = None
        if self.transformers and max(self.batches) > 1:
            left_out["transformers at more than one row: its rows must have prompts of one length"] = None
        if self.transformers and any(self.temperatures):
            left_out["transformers at a temperature: it takes the likeliest tokens"] = None
        return list(found), list(left_out)

    def _requested(self) -> Iterator[Drafting]:
        for draft in self.drafts:
            if draft == NONE:
                continue  # always included
            # Look-ups rank without logits, and have no head to limit.
            noises = [noise == "shared" for noise in self.noises] if draft in NETWORKS else [True]
            spared = [*itertools.product(self.vocabs, self.windows)] if draft in NETWORKS else [(None, None)]
            largest = self.chosen
            if draft == AUTO:  # the engine's default: always measured, first
                largest = largest or DEFAULT_BOUNDS
                yield Drafting(draft, largest, True, noises[0], *spared[0])
            for shape, noise, own in itertools.product(self.shapes, noises, spared):
                yield Drafting(draft, shape, False, noise, *own)
            if self.chosen and largest:
                if only_chains(draft):
                    steps = largest.num_steps
                    largest = DraftShape(steps, 1, min(largest.num_draft_tokens, steps + 1))
                yield from (Drafting(draft, largest, True, noises[0], *own) for own in spared)


def widest(draftings: Sequence[Drafting], draft: str) -> Mapping[str, Any]:
    """Return fields of EngineConfig that reserve memory for all shapes of one drafter."""
    shapes = [d.shape for d in draftings if d.draft == draft and d.shape]
    if not shapes:
        return {"draft": draft}
    whole = DraftShape(
        *(max(getattr(s, name) for s in shapes) for name in ("num_steps", "topk", "num_draft_tokens"))
    )
    fields = Drafting(draft, whole).fields()
    try:
        bounds_of(EngineConfig.of(None, fields))
    except ConfigError:
        # No drafter supports all three maxima at once.
        fields = Drafting(draft, max(shapes, key=lambda s: (s.num_draft_tokens, s.num_steps))).fields()
    return fields
