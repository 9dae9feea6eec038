"""A load that alternates between many short and few long requests, and its use of the arena.

`python -m tests.core.swing` prints it for the shipped model. Only steps with requests waiting for memory
count: otherwise there is nothing to fill it with. Outputs end at their length limit; drafts continue.
"""

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec import SamplingParams, SpecEngine
from specdec.core.scheduler import BLOCKS, STATES


@dataclass(frozen=True, slots=True)
class Load:
    """A number of requests with prompts and outputs of fixed lengths."""

    requests: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class End:
    """The result of one phase of the load."""

    slabs: Sequence[float]
    """Share of slabs in use, for each step with requests waiting for memory."""
    bytes: Sequence[float]
    """Share of the arena's bytes held by requests, excluding the prefix cache, holes and padding."""
    most_running: int
    drafted: int
    preempted: int

    def full(self, part: float) -> float:
        """Return the share of those steps with more than a given share of slabs in use."""
        return sum(slab > part for slab in self.slabs) / max(len(self.slabs), 1)


def swing(engine: SpecEngine, loads: Sequence[Load], vocab: int) -> Iterator[End]:
    """Run the loads one after the other on one engine."""
    loop, draw = engine.model.loop, random.Random(0)
    scheduler, right = loop.scheduler, loop.step
    slabs, taken, running = list[float](), list[float](), list[int]()

    def waited() -> int:
        return scheduler.limited_by[BLOCKS] + scheduler.limited_by[STATES]

    def step() -> None:
        before = waited()
        right()
        running.append(len(scheduler.running))
        if waited() > before:
            usage = loop.arena.usage()
            slabs.append(1 - usage.free_slabs / usage.slabs)
            taken.append(usage.used_bytes / usage.capacity_bytes)

    loop.step = step  # type: ignore[method-assign]
    for load in loads:
        for list_ in (slabs, taken, running):
            list_.clear()
        drafted, preempted = loop.counts.drafted, scheduler.preemptions
        prompts = [[draw.randrange(vocab) for _ in range(load.prompt)] for _ in range(load.requests)]
        params = SamplingParams(max_tokens=load.output, temperature=0.5, seed=1, ignore_eos=True)
        done = engine.generate(prompts, params)
        assert all(own.finish_reason == "length" for own in done)
        yield End(
            tuple(slabs),
            tuple(taken),
            max(running),
            loop.counts.drafted - drafted,
            scheduler.preemptions - preempted,
        )


def main() -> None:
    """Print the shipped model's results, with and without the prefix cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-bytes", type=int, default=24_000_000)
    memory = parser.parse_args().memory_bytes
    many, few = Load(150, 20, 40), Load(16, 1500, 200)
    print("prefixes  load  waited  slabs > 90 %  slabs, p50  bytes, p50  running  drafted  preempted")
    for prefix_cache in (False, True):
        with SpecEngine("tiny", memory_bytes=memory, max_running=256, prefix_cache=prefix_cache) as engine:
            for load, end in zip((many, few, many), swing(engine, (many, few, many), 1000), strict=True):
                print(
                    f"{'kept' if prefix_cache else 'not':8}  {'many' if load is many else 'few':4}"
                    f"  {len(end.slabs):6}  {end.full(0.9):12.0%}  {statistics.median(end.slabs):10.1%}"
                    f"  {statistics.median(end.bytes):10.1%}  {end.most_running:7}  {end.drafted:7}"
                    f"  {end.preempted:9}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
