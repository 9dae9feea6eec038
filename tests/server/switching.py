"""Cost of switching between models of one process: TTFT, a burst, and memory.

`python -m tests.server.switching` serves random models of a named size that take turns on one arena. Each
round asks every model twice: the first request has to switch models, the second finds its own loaded.
"""

import argparse
import contextlib
import http.client
import json
import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from specdec.bench.random_model import cached_checkpoint, shape_config
from specdec.config.base import parse_bytes
from specdec.config.options import at_least
from tests.server.live import Live, total

MIB = 1 << 20


class Answer(NamedTuple):
    first_s: float
    """TTFT."""
    tokens: list[int]
    reason: str | None


class Asker:
    """Stream answers to random prompts, which no cache contains."""

    def __init__(self, live: Live, prompt_tokens: int) -> None:
        url = urlsplit(live.url)
        self.host, self.port, self.prompt_tokens = url.hostname or "", url.port, prompt_tokens
        self._random = random.Random(1)

    def prompt(self) -> list[int]:
        return [self._random.randrange(10, 250) for _ in range(self.prompt_tokens)]

    def ask(self, model: str, prompt: Sequence[int], tokens: int) -> Answer:
        """Request a greedy answer of `tokens` tokens."""
        fields = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = json.dumps({"model": model, "prompt": list(prompt), "stream": True, **fields})
        start_s, first_s, said, reason = time.perf_counter(), 0.0, list[int](), None
        with contextlib.closing(http.client.HTTPConnection(self.host, self.port, timeout=300)) as connection:
            connection.request("POST", "/v1/completions", body)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                (choice,) = json.loads(line[6:]).get("choices") or [{}]
                if choice.get("token_ids") and not first_s:
                    first_s = time.perf_counter() - start_s
                said += choice.get("token_ids") or []
                reason = choice.get("finish_reason") or reason
        return Answer(first_s, said, reason)


@contextlib.contextmanager
def watched_memory(process: int) -> Iterator[list[int]]:
    """Sample a process's resident bytes many times per second."""
    seen: list[int] = [resident_bytes(process)]
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            seen.append(resident_bytes(process))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def resident_bytes(process: int) -> int:
    """Return a process's anonymous bytes: checkpoint pages belong to the page cache."""
    pages = Path(f"/proc/{process}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--memory-bytes", default="512MiB", type=parse_bytes)
    parser.add_argument("--weights-bytes", type=parse_bytes, help="so little that models are unloaded")
    parser.add_argument("--switch-after", default=1.0, type=float)
    parser.add_argument("--write", action="store_true", help="write the models, and measure nothing")
    for option, default in (("--models", 3), ("--rounds", 8), ("--prompt-tokens", 128), ("--burst", 3)):
        parser.add_argument(option, type=at_least(1), default=default)
    args = parser.parse_args()
    folders = [str(cached_checkpoint(shape_config(args.shape), seed=i)) for i in range(args.models)]
    if args.write:
        return
    names = [f"m{i}" for i in range(args.models)]
    options = ["--draft", "none", "--memory-bytes", str(args.memory_bytes)]
    options += ["--switch-after", str(args.switch_after)]
    options += ["--weights-bytes", str(args.weights_bytes)] if args.weights_bytes else []
    options += [word for name in names for word in ("--served-model-name", name)]
    with Live(*options, model=folders[0], beside=folders[1:]) as live:
        asker = Asker(live, args.prompt_tokens)
        results = {"cpus": len(os.sched_getaffinity(0)), "shape": args.shape, "models": args.models}
        results |= _switches(live, asker, names, args.rounds)
        results |= _burst(live, asker, names, args.burst, args.memory_bytes)
    print(json.dumps(results))


def _switches(live: Live, asker: Asker, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measure TTFT with and without a switch, in turn."""
    switched: list[float] = []
    stayed: list[float] = []
    with watched_memory(live.process.pid) as seen:
        for index in range(rounds + 1):
            for name in names:
                for times in (switched, stayed):
                    answer = asker.ask(name, asker.prompt(), 2)
                    if index:  # the first round touches pages and records tapes
                        times.append(answer.first_s)
    apart = [own - other for own, other in zip(switched, stayed, strict=True)]
    figures = live.metrics()
    found = {
        "switched_ms": _ms(switched),
        "stayed_ms": _ms(stayed),
        "apart_ms": {**_ms(apart), "most": round(max(apart) * 1e3, 1)},
        "resident_mib": [seen[0] // MIB, max(seen) // MIB],
    }
    for kind in ("wake", "load"):
        own = {key: value for key, value in figures.items() if f'kind="{kind}"' in key}
        count, seconds = (
            total(own, f"specdec:{name}_total") for name in ("model_switches", "model_switch_seconds")
        )
        found[f"{kind}s"], found[f"mean_{kind}_ms"] = count, round(seconds / max(count, 1) * 1e3, 1)
    print(f"first token after a switch {found['switched_ms']}, without {found['stayed_ms']} ms; ")
    print(f"in the same round {found['apart_ms']} ms more; {found}")
    return found


def _burst(live: Live, asker: Asker, names: Sequence[str], each: int, memory_bytes: int) -> dict[str, Any]:
    """Ask all models at once; compare with the same prompts one by one."""
    tokens, asked = 48, [(name, asker.prompt()) for _ in range(each) for name in names]
    before = live.metrics()
    start_bytes = resident_bytes(live.process.pid)
    with watched_memory(live.process.pid) as seen, ThreadPoolExecutor(len(asked)) as pool:
        start_s = time.perf_counter()
        answers = [*pool.map(lambda own: asker.ask(*own, tokens), asked)]
        took_s = time.perf_counter() - start_s
    after = live.metrics()
    alone = [asker.ask(*own, tokens) for own in asked]
    grown = {
        name: total(after, f"{name}_total") - total(before, f"{name}_total")
        for name in ("specdec:model_switches", "vllm:num_preemptions")
    }
    found = {
        "burst": len(asked),
        "whole": sum(answer.reason == "length" and len(answer.tokens) == tokens for answer in answers),
        "same_as_alone": sum(own.tokens == other.tokens for own, other in zip(answers, alone, strict=True)),
        "seconds": round(took_s, 1),
        "switches": grown["specdec:model_switches"],
        "preemptions": grown["vllm:num_preemptions"],
        "resident_mib_before": start_bytes // MIB,
        "resident_mib_most": max(seen) // MIB,
        "resident_mib_after": resident_bytes(live.process.pid) // MIB,
        "memory_mib": memory_bytes // MIB,
    }
    print(f"burst: {found}")
    return found


def _ms(seconds: Sequence[float]) -> dict[str, float]:
    own = sorted(seconds)
    named = {"median": statistics.median(own), "p10": own[len(own) // 10], "p90": own[len(own) * 9 // 10]}
    return {name: round(value * 1e3, 1) for name, value in named.items()}


if __name__ == "__main__":
    main()
