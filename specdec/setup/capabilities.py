"""Supported combinations: one table for errors, docs/families.md and tests.

All combinations of the axes are supported, except those refused by a rule.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import astuple, dataclass, fields

from specdec.config.drafters import AUTO, DRAFTER_OPTIONS, NONE
from specdec.config.sampling import SamplingParams
from specdec.errors import ConfigError, RequestError
from specdec.models import families
from specdec.setup.drafters import DRAFTERS, auto_drafters, quoted_heads
from specdec.setup.refusal import Refusal


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination: a value per axis."""

    drafter: str
    shape: str
    backing: str
    steps: str
    prefixes: str
    family: str
    sampling: str
    batch: str


AXES: Mapping[str, tuple[str, ...]] = {
    "drafter": (NONE, *DRAFTERS, AUTO),
    "shape": ("chain", "tree"),
    "backing": ("record", "snapshot"),
    "steps": ("host", "device"),
    "prefixes": ("read", "kept"),
    "family": tuple(families.TITLES),
    "sampling": (
        "greedy",
        "temperature",
        "filters",
        "penalties",
        "logit_bias",
        "logprobs",
        "stop",
        "structured",
        "words",
    ),
    "batch": ("alone", "mixed", "preempted"),
}
"""`filters` are top-k, top-p and min-p; a `mixed` step prefills besides decode rows. With graphs, the
`device` runs the steps it can. Shared prefixes are `kept` in the cache, or `read`, that is prefilled again.
"""


NO_DRAFT = Refusal("topk", 'it has no meaning with draft="none"', "choose a drafter or leave it out")
NO_TREE = {
    name: Refusal("topk", f"draft={name!r} drafts chains only", "leave it out or choose another drafter")
    for name, own in DRAFTER_OPTIONS.items()
    if own.chains
}
SYNTHETIC_LOOKUP = Refusal(
    "synthetic_acceptance",
    "look-ups draft only where the text repeats itself, so they cannot guarantee a length",
    f"use draft={quoted_heads()}, with a model that has such a head, or draft='self-int4'",
)
SYNTHETIC_LOGPROBS = Refusal(
    "logprobs",
    "with synthetic_acceptance drafts are accepted regardless of the model's output",
    "leave one of the two out",
)
SYNTHETIC_STRUCTURED = Refusal(
    "structured_outputs",
    "with synthetic_acceptance drafts are accepted regardless of the grammar",
    "leave one of the two out",
)
SYNTHETIC_WORDS = {
    field: Refusal(
        field,
        "with synthetic_acceptance drafts are accepted regardless of the allowed tokens",
        "leave one of the two out",
    )
    for field in ("allowed_token_ids", "bad_words", "thinking")
}
"""Refused for requests, not cells: synthetic acceptance is for benchmarks and has no axis."""

RULES: tuple[tuple[Mapping[str, str], Refusal], ...] = (
    *(({"drafter": name, "shape": "tree"}, why) for name, why in NO_TREE.items()),
    *(
        ({"drafter": name, "family": family}, own.missing)
        for name, own in DRAFTERS.items()
        for family in own.lacking
        if own.missing
    ),
    *(
        ({"drafter": name, "steps": "device"}, own.host_only)
        for name, own in DRAFTERS.items()
        if own.host_only
    ),
    ({"drafter": NONE, "shape": "tree"}, NO_DRAFT),
)
"""Cells with all of these values are refused."""


def cells() -> Iterator[Cell]:
    """Yield every combination, including refused ones."""
    return itertools.starmap(Cell, itertools.product(*AXES.values()))


def refusal(cell: Cell) -> Refusal | None:
    """Return why a combination is refused, or None."""
    values = dict(zip((field.name for field in fields(cell)), astuple(cell), strict=True))
    return next((reason for condition, reason in RULES if condition.items() <= values.items()), None)


def resolve_drafters(
    draft: str, heads: Collection[str], *, synthetic: bool = False, graphs: bool = False, looks: bool = True
) -> tuple[str, ...]:
    """Return the drafters, given the available heads. `auto` selects the first head, and look-ups.

    With synthetic acceptance only the head is used, since it always drafts; also without `looks`, when the
    device drafts and no look-ups run between steps.
    """
    if draft == NONE:
        return ()
    head, others = auto_drafters(heads) if draft == AUTO else (draft, ())
    if synthetic and not (head and DRAFTERS[head].has_weights):
        raise ConfigError(str(SYNTHETIC_LOOKUP), field=SYNTHETIC_LOOKUP.field)
    refused = DRAFTERS[head].missing if head and head not in heads else None
    if head and graphs:
        refused = refused or DRAFTERS[head].host_only
    if refused:
        raise ConfigError(str(refused), field=refused.field)
    if head and (synthetic or not looks):
        return (head,)
    return (*([head] if head else []), *others)


def check_request(params: SamplingParams, *, synthetic: bool) -> None:
    """Raise for request features that synthetic acceptance does not support."""
    for is_set, refused in (
        (params.logprobs is not None, SYNTHETIC_LOGPROBS),
        (params.structured_outputs, SYNTHETIC_STRUCTURED),
        *((getattr(params, field), refused) for field, refused in SYNTHETIC_WORDS.items()),
    ):
        if synthetic and is_set:
            raise RequestError(str(refused), field=refused.field)
