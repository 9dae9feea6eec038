"""With one seed the text is the same for every drafter, shape, backing, batch and memory size.

Families with the same recurrent layers share a set of cells in which every pair of values of two axes occurs,
with all sampling features in each: backings, commits and prefixes depend on these layers. Each family visits
every value. The exhaustive run adds all other cells of two families; the default run takes fewer, so that all
families together hold every pair. Float64, so that rounding decides nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from specdec import Completion, SamplingParams, SpecEngine
from specdec.models import families
from specdec.setup.capabilities import AXES, cells, refusal
from tests.lossless.cases import (
    FEW,
    SHAPES,
    Case,
    differences,
    drafting_engine,
    generate,
    in_brief,
    memory_for,
    preempt_each,
    rounding,
)
from tests.lossless.covering import Row, covering, pairs
from tests.models.agreeing import CONFIGS
from tests.models.representatives import EVERY_CELL
from tests.selection import EXHAUSTIVE

Known = Callable[[str], tuple[Path, list[Case]]]
Group = tuple[str, ...]
"""Family, drafter, shape, backing, and where steps are decided (host or device)."""
Place = tuple[str, str]
"""Prefix cache mode and batch."""
Visit = tuple[Place, Sequence[Case], Sequence[Sequence[Completion]]]


@pytest.fixture(scope="module")
def brief(known: Known) -> Callable[[str], list[Case]]:
    """Return a function from a family to plain decoding outputs of few tokens."""
    return cache(lambda family: in_brief(*known(family)))


def ways() -> Mapping[str, list[Row]]:
    """Return the drafters, shapes, backings, steps, prefixes and batches of each family.

    The oracle is used wherever ngram is. Mixed and preempted batches run on the host, which alternates with
    the device in families of which every cell is visited.
    """
    found: dict[str, list[Row]] = {}
    for cell in cells():
        takes_turns = cell.steps == "host" or cell.batch == "alone" or cell.family in EVERY_CELL
        if cell.sampling == "greedy" and takes_turns and not refusal(cell):
            row = cell.drafter, cell.shape, cell.backing, cell.steps, cell.prefixes, cell.batch
            found.setdefault(cell.family, []).append(row)
    for own in found.values():
        own += [("oracle", *rest) for drafter, *rest in own if drafter == "ngram"]
    return found


WAYS = ways()


@cache
def recurrent_layers(family: str) -> frozenset[type]:
    """Return the kinds of a family's layers that keep a state."""
    mixers = families.network(CONFIGS[family]().to_dict()).mixers()
    return frozenset(type(mixer) for mixer in mixers if mixer.state_shape())


def sharing(family: str) -> Group:
    """Return the families that cover every pair of values together; those of `EVERY_CELL` stay alone."""
    if family in EVERY_CELL:
        return (family,)
    own = recurrent_layers(family)
    return tuple(each for each in WAYS if each not in EVERY_CELL and recurrent_layers(each) == own)


@cache
def shared(families: Group) -> list[Row]:
    """Return a pairwise covering over several families, whose rows start at different offsets."""
    every: list[Row] = []
    for family in families:
        first = 7 * list(WAYS).index(family)
        every += [(family, *row) for row in (*WAYS[family][first:], *WAYS[family][:first])]
    return covering(every)


def visited(family: str) -> list[Row]:
    """Return the visited cells of a family."""
    return [tuple(row) for own, *row in shared(sharing(family)) if own == family]


def groups(rows: Callable[[str], Sequence[Row]]) -> Mapping[Group, list[Place]]:
    """Group the cells by engine settings."""
    found: dict[Group, list[Place]] = {}
    for family in WAYS:
        for *settings, prefixes, batch in rows(family):
            found.setdefault((family, *settings), []).append((prefixes, batch))
    return found


def others(family: str) -> list[Row]:
    """Return the remaining cells, for families of which every cell is visited."""
    first = set(visited(family)) if family in EVERY_CELL else set(WAYS[family])
    return [row for row in WAYS[family] if row not in first]


PAIRWISE, REST = groups(visited), groups(others)
DEFAULT = {
    (family, *settings)
    for family, *settings, _, _ in covering([(family, *row) for family in WAYS for row in visited(family)])
}
"""Cells of `make test`: every pair of values in some family, and every value in each."""
CELLS = [
    *(
        pytest.param(group, places, id="-".join(group), marks=() if group in DEFAULT else EXHAUSTIVE)
        for group, places in PAIRWISE.items()
    ),
    *(
        pytest.param(group, places, id="-".join((*group, "rest")), marks=EXHAUSTIVE)
        for group, places in REST.items()
    ),
]
ORDER = list({**PAIRWISE, **REST})


@pytest.mark.parametrize("family", AXES["family"])
def test_few_rows_hold_every_pair_of_values(family: str) -> None:
    every = set().union(*(pairs((own, *row)) for own in sharing(family) for row in WAYS[own]))
    assert set().union(*(pairs((own, *row)) for own in sharing(family) for row in visited(own))) == every
    for axis in range(len(WAYS[family][0])):
        assert {row[axis] for row in visited(family)} == {row[axis] for row in WAYS[family]}
    assert len(visited(family)) < 30


@pytest.mark.parametrize("family", EVERY_CELL)
def test_all_rows_are_visited_once(family: str) -> None:
    found = [
        (*group[1:], *place)
        for cells in (PAIRWISE, REST)
        for group, places in cells.items()
        for place in places
        if group[0] == family
    ]
    assert sorted(found) == sorted(WAYS[family])


LOOK_UPS = ("ngram", "suffix", "auto", "oracle")
"""Drafters that run on the host before every step; device steps beside them are timing-dependent."""


def is_decided(engine: SpecEngine, steps: str) -> bool:
    """Return whether the device decided steps, if required."""
    runner = engine.model.loop.runner
    return runner.steps > 0 if runner else steps == "host"


def hits(engine: SpecEngine, cases: Sequence[Case]) -> list[list[Completion]]:
    """Answer each request after a run of its prompt has left a state in the prefix cache."""
    for case in cases:
        engine.generate([case.prompt], SamplingParams(max_tokens=1))
    done = [own for case in cases for own in generate(engine, [case])]
    assert sum(own[0].stats.cached_tokens for own in done) > 20
    return done


def visits(
    known: Known, brief: Callable[[str], list[Case]], group: Group, places: Sequence[Place]
) -> Iterator[Visit]:
    """Run the requests in each place, sharing one engine for all with a prefix cache; yield the outputs."""
    family, drafter, shape, backing, steps = group
    folder, cases = known(family)
    by_length = sorted(cases, key=lambda case: len(case.said[0].token_ids))
    longest = list({case.feature: case for case in by_length}.values())
    # Of each feature, one request hits the cache and another prefills beside others, alternating.
    last = [case for case in cases if case not in longest and len(case.said[0].token_ids) > FEW]
    others = list({case.feature: case for case in (*longest, *last)}.values())
    again, once = (longest, others) if ORDER.index(group) % 2 else (others, longest)
    fields = {**SHAPES[shape], "slots": backing, "graphs": steps == "device"}
    if ("read", "alone") in places:
        with drafting_engine(folder, drafter, cases, chunk_tokens=512, **fields) as (engine, _):
            yield ("read", "alone"), longest, [own for case in longest for own in generate(engine, [case])]
            assert is_decided(engine, steps)
    if ("read", "mixed") in places:
        with drafting_engine(folder, drafter, cases, chunk_tokens=5, **fields) as (engine, seen):
            yield ("read", "mixed"), once, generate(engine, once)
            # N-grams seldom match during prefill: the oracle covers this case.
            assert seen.mixed > 0 or drafter in ("none", "ngram")
            layout = engine.model.settings.layout
    if ("read", "preempted") in places:
        with drafting_engine(folder, drafter, cases, **fields) as (engine, _):
            layout = engine.model.settings.layout
        # Memory for three sequences, each of which is still preempted once.
        fields["memory_bytes"] = memory_for(layout, sequences=3, blocks=10)
        with drafting_engine(folder, drafter, cases, chunk_tokens=64, **fields) as (engine, _):
            preempt_each(engine)
            yield ("read", "preempted"), longest, generate(engine, longest)
        del fields["memory_bytes"]
    if kept := [place for place in places if place[0] == "kept"]:
        with drafting_engine(folder, drafter, cases, chunk_tokens=11, prefix_cache=True, **fields) as (
            engine,
            _,
        ):
            preempt_each(engine)
            if kept != [("kept", "alone")]:
                done = generate(engine, again)
                yield from ((place, again, done) for place in kept if place != ("kept", "alone"))
            if ("kept", "alone") in kept:
                few = [brief(family)[cases.index(case)] for case in again]
                yield ("kept", "alone"), few, hits(engine, few)
                assert is_decided(engine, steps) or drafter in LOOK_UPS


@pytest.mark.parametrize(("group", "places"), CELLS)
def test_every_supported_cell_equals_plain_decoding(
    known: Known, brief: Callable[[str], list[Case]], group: Group, places: Sequence[Place]
) -> None:
    within = rounding(families.network(CONFIGS[group[0]]().to_dict()))
    seen = set()
    for place, asked, found in visits(known, brief, group, places):
        assert differences(asked, found, within=within) == []
        seen |= {
            (*place, case.feature)
            for case, done in zip(asked, found, strict=True)
            if place[1] != "preempted" or any(own.stats.preemptions for own in done)
        }
    assert seen == {(*place, feature) for place in places for feature in AXES["sampling"]}
