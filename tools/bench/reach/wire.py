"""The transfer alone: copies prompts' KV cache out of another process's arena."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from specdec.bench.random_model import shape_config
from specdec.errors import EngineError
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import network, stored_dtype
from specdec.models.network import memory_layout
from specdec.reach.carrier import Carrier, ReadLost
from specdec.reach.nixl import Nixl
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import Layout
from specdec.state_slots.transfer.model_layout import ModelLayout
from specdec.state_slots.transfer.plan import ArenaView, TransferPlan, make_plans
from tools.bench.options import ReachOptions
from tools.bench.reach.serve import milliseconds, percentiles
from tools.bench.reach.servers import on_core, two_cores

REPEATS = 20
"""Counted reads of each length; the very first is reported separately, as it connects."""
DEADLINE_S = 60.0
PEER = "holder"


@dataclass(frozen=True, slots=True)
class PromptSlots:
    """A prompt's memory in an arena: its first blocks, followed by a state."""

    blocks: range
    state: int | None

    @classmethod
    def of(cls, layout: Layout, tokens: int) -> "PromptSlots":
        """Lay the slots out after the reserved slab."""
        first, blocks = layout.blocks_per_slab, layout.blocks_for(tokens)
        slabs = 1 + -(-blocks // layout.blocks_per_slab)
        state = slabs * layout.states_per_slab if layout.states else None
        return cls(range(first, first + blocks), state)


def measure_wire(options: ReachOptions) -> dict[str, Any]:
    """Fetch prompts of two lengths repeatedly, after comparing every byte once."""
    layout = _layout(options)
    lengths = sorted({options.prompt_tokens, options.long_tokens})
    num_bytes = _arena_bytes(layout, lengths[-1])
    cores = two_cores(options.cores)
    here, there = (None, None) if cores is None else cores
    with _holding(layout, num_bytes, options.seed or 0, there) as (metadata, view), on_core(here):
        arena = Arena(layout, num_bytes, torch.device("cpu"))
        carrier = Nixl(arena)
        try:
            plan = make_plans(view_of(arena), [view])[0]
            begin_s = time.perf_counter()
            carrier.attach(PEER, metadata, plan)
            first = PromptSlots.of(layout, lengths[0])
            _read(carrier, plan, first)
            connect_s = time.perf_counter() - begin_s
            cases = [_case(carrier, plan, arena, tokens, options.seed or 0) for tokens in lengths]
        finally:
            carrier.close()
    return {
        "shape": options.shape or options.model,
        "carrier": carrier.name,
        "block_bytes": layout.block_bytes,
        "state_bytes": layout.state_bytes,
        "first_contact_s": connect_s,
        "cases": cases,
    }


def _layout(options: ReachOptions) -> Layout:
    config = shape_config(options.shape) if options.shape else Checkpoint(options.model).config
    spec = network(config)
    return memory_layout(spec, stored_dtype(config), head=spec.mtp)


def _arena_bytes(layout: Layout, tokens: int) -> int:
    """Return the bytes for one prompt's blocks and a state, and the reserved slab."""
    return (2 + -(-layout.blocks_for(tokens) // layout.blocks_per_slab)) * layout.slab_bytes


def view_of(arena: Arena) -> ArenaView:
    """Describe an arena to a peer."""
    return ArenaView(arena.data.data_ptr(), arena.data.nbytes, ModelLayout.of(arena.layout), 1, 0, 0)


@contextmanager
def _holding(
    layout: Layout, num_bytes: int, seed: int, core: int | None
) -> Iterator[tuple[bytes, ArenaView]]:
    """Start a process that holds an arena of random bytes; yield the metadata needed to read from it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs, layout, num_bytes, seed), daemon=True)
    with on_core(core):
        process.start()
    theirs.close()
    try:
        yield ours.recv()
    except EOFError:
        raise EngineError("the process with the other arena has exited; see its output above") from None
    finally:
        ours.close()  # ends the process
        process.join()


def _hold(connection: Connection, layout: Layout, num_bytes: int, seed: int) -> None:
    arena = Arena(layout, num_bytes, torch.device("cpu"))
    _fill(arena, seed)
    carrier = Nixl(arena)
    try:
        connection.send((carrier.metadata, view_of(arena)))
        connection.poll(None)
    finally:
        carrier.close()


def _fill(arena: Arena, seed: int) -> None:
    arena.data.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def _case(carrier: Carrier, plan: TransferPlan, arena: Arena, tokens: int, seed: int) -> dict[str, Any]:
    slots = PromptSlots.of(arena.layout, tokens)
    _check(carrier, plan, arena, slots, seed)
    times_s = [_read(carrier, plan, slots) for _ in range(REPEATS)]
    num_bytes = plan.num_bytes(len(slots.blocks), int(slots.state is not None))
    own = percentiles(times_s)
    assert own is not None
    return {
        "tokens": tokens,
        "descriptors": len(_indices(plan, slots)[0]),
        "bytes": num_bytes,
        "transfer_s": own,
        "bytes_per_s": num_bytes / own["p50"],
    }


def _indices(plan: TransferPlan, slots: PromptSlots) -> Any:
    """Pair the holder's blocks with ours in reverse order: an identity mapping would hide mistakes."""
    pairs = [*zip(slots.blocks, reversed(slots.blocks), strict=True)]
    return plan.pick(pairs, None if slots.state is None else (slots.state, slots.state))


def _read(carrier: Carrier, plan: TransferPlan, slots: PromptSlots) -> float:
    """Read one prompt's memory; return the seconds until it has arrived."""
    indices = _indices(plan, slots)
    num_bytes = plan.num_bytes(len(slots.blocks), int(slots.state is not None))
    begin_s = time.perf_counter()
    try:
        carrier.read(PEER, indices, num_bytes, DEADLINE_S).done.result()
    except ReadLost as error:
        raise EngineError(f"a read over {carrier.name} was lost ({error}); no figure is shown") from error
    return time.perf_counter() - begin_s


def _check(carrier: Carrier, plan: TransferPlan, arena: Arena, slots: PromptSlots, seed: int) -> None:
    """Raise unless every byte was read to the right position."""
    theirs = Arena(arena.layout, arena.data.nbytes, arena.data.device)
    _fill(theirs, seed)
    arena.data.zero_()
    _read(carrier, plan, slots)
    layout, pairs = arena.layout, zip(slots.blocks, reversed(slots.blocks), strict=True)
    spans = [
        (ours * layout.block_bytes, their * layout.block_bytes, layout.block_bytes) for ours, their in pairs
    ]
    if slots.state is not None:
        start = slots.state // layout.states_per_slab * layout.slab_bytes
        spans.append((start, start, layout.state_bytes))
    for ours, their, size in spans:
        if not torch.equal(arena.data[ours : ours + size], theirs.data[their : their + size]):
            raise EngineError(f"{carrier.name} read other bytes than the holder has; no figure is shown")


def wire_rows(report: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for case in report["cases"]:
        yield {
            "tokens": f"{case['tokens']:,}",
            "descriptors": str(case["descriptors"]),
            "MB": f"{case['bytes'] / 1e6:,.2f}",
            "ms": milliseconds(case["transfer_s"]),
            "GB/s": f"{case['bytes_per_s'] / 1e9:.2f}",
        }
