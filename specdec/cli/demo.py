"""The demo: stream the shipped model's text with accepted drafts in colour, and show the speedup."""

import asyncio
import statistics
import sys
import time
from pathlib import Path

from specdec.cli.terminal import stream_text
from specdec.config.engine import EngineConfig
from specdec.config.sampling import SamplingParams
from specdec.engine.engine import SpecEngine

PROMPT = '''class Parser:
    """Read a settings file."""

    def __init__(self, path):
'''
TOKENS, ROUNDS, SKIPPED = 192, 7, 64
"""Tokens of a text, rounds of the comparison, and the first tokens, which are not timed: during them the
engine learns which drafts pay."""
MEMORY = 256 << 20
"""Memory of each engine: two run side by side, and neither may take most of it."""


def demo() -> None:
    """Stream a greedy text and one at temperature 1, comparing each with the same engine without drafts."""
    print("specdec's own small model, which knows Python's syntax and little else:\n", file=sys.stderr)
    config = EngineConfig(memory_bytes=MEMORY, max_model_len=1024)
    with SpecEngine("tiny", config) as engine, SpecEngine("tiny", config, draft="none") as plain:
        for each in (engine, plain):
            each.warm_up()
            each.model.loop.disable_sharing()  # rounds repeat one text, which look-ups would find
        for temperature, title in ((0.0, "greedily"), (1.0, "at temperature 1, with a seed")):
            params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=7, ignore_eos=True)
            print(f"--- {title}", file=sys.stderr, flush=True)
            print(PROMPT, end="", flush=True)
            stream_text(engine, PROMPT, params)
            print(f"{_compared(engine, plain, params)}\n", file=sys.stderr, flush=True)
    name = sys.argv[0] if Path(sys.argv[0]).name == "specdec" else "specdec"  # a clone's is not on PATH
    print(f"More: {name} generate tiny TEXT; {name} bench acceptance tiny", file=sys.stderr)


def _compared(engine: SpecEngine, plain: SpecEngine, params: SamplingParams) -> str:
    """Generate the same text with both in turn; report the speedup, its spread and the engine's outlook."""
    ratios, texts = [], set[tuple[int, ...]]()
    for number in range(ROUNDS):
        seconds = {}
        for each in (engine, plain) if number % 2 else (plain, engine):
            tokens, seconds[each] = asyncio.run(_timed(each, params))
            texts.add(tokens)
        ratios.append(seconds[plain] / seconds[engine])
    same = "the same text" if len(texts) == 1 else "a different text, by bfloat16 rounding"
    state = engine.stats().speculation
    return (
        f"{statistics.median(ratios):.2f} x as fast as without drafts after the first {SKIPPED} tokens "
        f"(median of {ROUNDS} rounds in turn, {min(ratios):.2f} to {max(ratios):.2f}): {same}\n"
        f"{state.reason if state else 'nothing was drafted'}"
    )


async def _timed(engine: SpecEngine, params: SamplingParams) -> tuple[tuple[int, ...], float]:
    """Generate the text; return its tokens, and the seconds per timed token."""
    tokens: list[int] = []
    marks: list[tuple[int, float]] = []
    async for delta in engine.stream(PROMPT, params):
        tokens += delta.token_ids
        if len(tokens) >= SKIPPED:
            marks.append((len(tokens), time.perf_counter()))
    (first, start_s), (last, end_s) = marks[0], marks[-1]
    return tuple(tokens), (end_s - start_s) / (last - first)
