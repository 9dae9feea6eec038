"""The drafters that a user may name; `setup/drafters.py` knows how each of them is made."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterOption:
    """What a drafter's name means to a user."""

    help: str
    reads_folder: bool = False
    """Its weights lie in a folder of their own, `draft_model`."""
    chains: bool = False
    """It drafts chains only."""


DRAFTER_OPTIONS: dict[str, DrafterOption] = {
    "mtp": DrafterOption("the model's own multi-token head"),
    "eagle": DrafterOption("an EAGLE head (draft_model)", reads_folder=True),
    "ngram": DrafterOption("what followed the last few tokens earlier"),
    "suffix": DrafterOption("what most often followed the longest match, also in earlier outputs"),
    "self-int4": DrafterOption("the model's own 4-bit copy, in chains, on a CPU", chains=True),
}
"""By the names that `draft` takes beside `auto` and `none`."""

AUTO, NONE = "auto", "none"


def known_drafter(name: str) -> str:
    """Return a name that `draft` may have; refuse any other."""
    if name not in (AUTO, NONE, *DRAFTER_OPTIONS):
        raise ValueError(name)
    return name


def only_chains(name: str) -> bool:
    """Return whether a drafter drafts chains only."""
    return name in DRAFTER_OPTIONS and DRAFTER_OPTIONS[name].chains


def drafters_of_folders() -> list[str]:
    """Name the drafters whose weights lie in a folder of their own."""
    return [name for name, option in DRAFTER_OPTIONS.items() if option.reads_folder]
