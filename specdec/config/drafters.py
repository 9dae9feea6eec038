"""Drafters available to users; `setup/drafters.py` builds them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterOption:
    """A drafter option for users."""

    help: str
    reads_folder: bool = False
    """Whether its weights are in a separate folder, `draft_model`."""
    chains: bool = False
    """Whether it drafts chains only."""


DRAFTER_OPTIONS: dict[str, DrafterOption] = {
    "mtp": DrafterOption("the model's own multi-token head"),
    "eagle": DrafterOption("an EAGLE head (draft_model)", reads_folder=True),
    "block": DrafterOption("a DFlash or DSpark head, a block in one pass (draft_model)", reads_folder=True),
    "ngram": DrafterOption("what followed the last few tokens earlier"),
    "suffix": DrafterOption("what most often followed the longest match, also in earlier outputs"),
    "self-int4": DrafterOption("the model's own 4-bit copy, in chains, on a CPU", chains=True),
}
"""By `draft` value, besides `auto` and `none`."""

AUTO, NONE = "auto", "none"


def known_drafter(name: str) -> str:
    """Return a valid `draft` value, or raise."""
    if name not in (AUTO, NONE, *DRAFTER_OPTIONS):
        raise ValueError(name)
    return name


def only_chains(name: str) -> bool:
    """Return whether a drafter drafts chains only."""
    return name in DRAFTER_OPTIONS and DRAFTER_OPTIONS[name].chains


def drafters_of_folders() -> list[str]:
    """Return the drafters with weights in a separate folder."""
    return [name for name, option in DRAFTER_OPTIONS.items() if option.reads_folder]
