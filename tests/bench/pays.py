"""Overhead of adaptive drafts: alternate between `draft="auto"` and none every few tokens.

`python -m tests.bench.pays --temperature 1` prints it for the bundled model, `--busy` next to a process that
busies a core, `--processor` by the CPU time of the engine's thread, which depends less on load. Both engines
have the same weights and step in one thread. Only tokens after a text's first 64 are compared.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from specdec.bench.acceptance.prompts import choose
from specdec.bench.random_model import cached_checkpoint, shape_config
from specdec.config.engine import EngineConfig
from specdec.config.options import at_least
from specdec.config.sampling import SamplingParams
from specdec.core.request import Request
from specdec.setup.build import LoadedModel, assemble, build

FIRST, TURN = 64, 16
LONGEST_PROMPT = 512
BUSY_S = 900


@dataclass(slots=True)
class Text:
    """One prompt's completion by one engine, and the time of its tokens after the first ones."""

    model: LoadedModel
    request: Request
    clock: Callable[[], float]
    seconds: float = 0.0

    def write(self, until: int) -> None:
        while self.request.output_length < until:
            start_s, before = self.clock(), self.request.output_length
            self.model.core.step()
            self.seconds += (self.clock() - start_s) * (before >= FIRST)


def ask(
    model: LoadedModel, prompt: Sequence[int], params: SamplingParams, clock: Callable[[], float]
) -> Text:
    """Start a completion."""
    assert params.seed is not None
    request = model.core.new_request(prompt, params, seed=params.seed, stop_ids={})
    model.core.add_request(request)
    return Text(model, request, clock)


def burn() -> None:
    """Busy a core for at most the duration of a run."""
    until_s = time.monotonic() + BUSY_S
    while time.monotonic() < until_s:
        sum(range(1000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--limit", type=at_least(1), default=4, help="prompts of each category")
    parser.add_argument("--tokens", type=at_least(FIRST + 1), default=256)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--shape", help="random weights of a named shape instead of the shipped model")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--processor", action="store_true")
    args = parser.parse_args()
    clock = time.thread_time if args.processor else time.perf_counter
    config = EngineConfig(draft=args.draft, memory_bytes=256 << 20, max_model_len=2048, prefix_cache=False)
    folder = cached_checkpoint(shape_config(args.shape), seed=0) if args.shape else "tiny"
    on = build(folder, config)
    off = replace(on, core=assemble(on.network, None, replace(on.settings, drafters=())))
    texts = [prompt.text for prompt in choose(None, (), args.limit)]
    draw = torch.Generator().manual_seed(0)
    prompts = (
        [on.tokenizer.encode(text)[-LONGEST_PROMPT:] for text in texts]
        if on.tokenizer
        else torch.randint(on.network.spec.vocab, (len(texts), 64), generator=draw).tolist()
    )
    neighbour = multiprocessing.get_context("spawn").Process(target=burn, daemon=True)
    if args.busy:
        neighbour.start()
    for model in (on, off):
        model.loop.disable_sharing()
    ratios, spent_s = [], [0.0, 0.0]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=i, ignore_eos=True)
        both = [ask(model, prompt, params, clock) for model in (on, off)]
        for turn, until in enumerate(range(TURN, args.tokens + TURN, TURN)):
            for text in both if turn % 2 else both[::-1]:
                text.write(min(until, args.tokens))
        own, plain = both
        ratios.append(plain.seconds / own.seconds)
        spent_s = [spent_s[0] + own.seconds, spent_s[1] + plain.seconds]
        counts = own.request.counts
        same = "same" if own.request.tokens == plain.request.tokens else "another text, by rounding"
        print(
            f"{i:3}: {ratios[-1]:.3f} x, {counts.accepted} of {counts.drafted} drafted tokens, {same}",
            flush=True,
        )
    if args.busy:
        neighbour.terminate()
    print(
        f"median {statistics.median(ratios):.3f} x, all texts {spent_s[1] / spent_s[0]:.3f} x, "
        f"least {min(ratios):.3f} x of draft none, after {FIRST} tokens"
    )


if __name__ == "__main__":
    main()
