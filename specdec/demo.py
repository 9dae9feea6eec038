"""What a newcomer sees first: the shipped model writes, drafts in colour, and what they earned."""

import statistics
import sys

from specdec.config import EngineConfig
from specdec.engine import SpecEngine
from specdec.outputs import RequestStats
from specdec.sampling import SamplingParams
from specdec.terminal import stream_text

PROMPT = '''class Parser:
    """Read a file of settings."""

    def __init__(self, path):
'''
TOKENS, ROUNDS = 128, 5
MEMORY = 256 << 20
"""Of each engine: two stand side by side, and neither may take most of what there is."""


def demo() -> None:
    """Stream a text greedily and one at temperature 1, each beside the same engine without drafts."""
    print("specdec's own small model, which knows Python's syntax and little else:\n", file=sys.stderr)
    config = EngineConfig(memory_bytes=MEMORY, max_model_len=1024)
    with SpecEngine("tiny", config) as engine, SpecEngine("tiny", config, draft="none") as plain:
        for each in (engine, plain):
            each.model.loop.keep_apart()  # the rounds write one text: to look it up would be no speculation
        for temperature, title in ((0.0, "greedily"), (1.0, "at temperature 1, with a seed")):
            params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=7, ignore_eos=True)
            print(f"--- {title}", file=sys.stderr, flush=True)
            print(PROMPT, end="", flush=True)
            stream_text(engine, PROMPT, params)
            print(f"{_compared(engine, plain, params)}\n", file=sys.stderr, flush=True)
    print("More: specdec generate tiny --prompt TEXT; specdec bench acceptance tiny", file=sys.stderr)


def _compared(engine: SpecEngine, plain: SpecEngine, params: SamplingParams) -> str:
    """Let both write the same text in turn, and say how much faster drafts made it."""
    ratios, texts = [], set()
    for _ in range(ROUNDS):
        own, without = (each.generate([PROMPT], params)[0] for each in (engine, plain))
        ratios.append(_seconds(without.stats) / _seconds(own.stats))
        texts |= {own.text, without.text}
    same = "the same text" if len(texts) == 1 else "another text, by bfloat16's rounding"
    faster = statistics.median(ratios)
    return f"{faster:.2f} x as fast as without drafts (median of {ROUNDS} rounds in turn): {same}"


def _seconds(stats: RequestStats) -> float:
    return stats.total_s - stats.first_token_s
