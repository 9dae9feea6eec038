"""One caller's hundreds of long rows beside another's stream: `python -m tests.core.long_rows`.

Prints the stream's longest pauses, the longest steps by the engine thread's CPU time, and the first caller's
throughput per second of wall and CPU time.
"""

import argparse
import random
import threading
import time
from itertools import pairwise
from pathlib import Path

from specdec import SamplingParams, SpecEngine
from specdec.config.tenant import Tenant
from specdec.core import loop
from specdec.core.outputs import Delta
from specdec.errors import SpecdecError


def stream(engine: SpecEngine, came_s: list[float], until: threading.Event) -> None:
    """Send one request after the other, and record the arrival times of their deltas."""
    while not until.is_set():
        ended = threading.Event()

        def emit(_: int, delta: Delta | SpecdecError, ended: threading.Event = ended) -> None:
            came_s.append(time.perf_counter())
            if isinstance(delta, SpecdecError) or delta.finish_reason:
                ended.set()

        params = SamplingParams(max_tokens=300, ignore_eos=True)
        engine.submit([engine.prepare("def fib(n):", params, tenant=Tenant("bob"))], emit)
        while not (ended.wait(0.1) or until.is_set()):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--options", action="store_true", help="penalties and 1,000 biases")
    parser.add_argument("--prompt", type=int, default=3900, help="tokens of each of two prompts (3900)")
    parser.add_argument("--n", type=int, default=127, help="choices of each (127)")
    parser.add_argument("--seconds", type=float, default=30, help="(30)")
    options = parser.parse_args()
    steps_s, tokens, came_s, until = list[float](), [0], list[float](), threading.Event()
    step = loop.DecodeLoop.step

    def timed(self: loop.DecodeLoop) -> None:
        start_s = time.thread_time()
        step(self)
        steps_s.append(time.thread_time() - start_s)

    loop.DecodeLoop.step = timed  # type: ignore[method-assign]

    def count(_: int, delta: Delta | SpecdecError) -> None:
        tokens[0] += len(delta.token_ids) if isinstance(delta, Delta) else 0

    with SpecEngine("tiny") as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode(Path(loop.__file__).read_text()) * 3
        given = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
        given["logit_bias"] = {token: random.uniform(-1, 1) for token in random.sample(range(10, 4096), 1000)}
        longest = engine.model.settings.max_model_len - options.prompt
        params = SamplingParams(
            n=options.n, max_tokens=longest, ignore_eos=True, **(given if options.options else {})
        )
        prompts = [ids[at : at + options.prompt] for at in (0, 7)]
        prepared = [engine.prepare(prompt, params, tenant=Tenant("alice")) for prompt in prompts]
        threading.Thread(target=stream, args=(engine, came_s, until), daemon=True).start()
        time.sleep(3)
        steps_s.clear()
        start_s, cpu_s = time.perf_counter(), time.process_time()
        engine.submit(prepared, count)
        time.sleep(options.seconds)
        took_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        until.set()
        print("longest steps, s of the thread:", [round(own, 3) for own in sorted(steps_s)[:-6:-1]])
    at = [own for own in came_s if own >= start_s - 0.5]
    pauses = sorted(later - earlier for earlier, later in pairwise(at))
    print("longest pauses, s:", [round(pause, 3) for pause in pauses[:-6:-1]])
    print(f"tokens/s: {tokens[0] / took_s:.0f}; per second of CPU: {tokens[0] / cpu_s:.0f}")


if __name__ == "__main__":
    main()
