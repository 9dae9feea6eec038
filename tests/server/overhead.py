"""HTTP overhead over the bare engine: the same prompts in turn, in this process and through a server.

`python -m tests.server.overhead` prints milliseconds per token of a row, TTFT, and the difference between
served and bare times in the same round. Both use the shipped model without drafts and prefix cache.
"""

import argparse
import json
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from specdec import SamplingParams, SpecEngine
from specdec.config.options import at_least
from specdec.engine.engine import PreparedPrompt
from tests.server.live import Live

OPTIONS = ("--draft", "none", "--no-prefix-cache")
PAUSE_S = 0.05
Times = tuple[float, float]
"""Seconds to the first token, and to the last of all rows."""


class Rows:
    """Prompts, answered by the engine or the server."""

    def __init__(self, engine: SpecEngine, live: Live, batch: int, tokens: int) -> None:
        self.engine, self.batch, self.tokens = engine, batch, tokens
        self.prompts = [f"import os\n\n\ndef f{i}(x):\n    return x\n" for i in range(batch)]
        url = urlsplit(live.url)
        self.address = (url.hostname, url.port)

    def bare(self) -> Times:
        """Run the prompts through the Python API."""
        first, ended, left = list[float](), threading.Event(), [self.batch]
        params = SamplingParams(max_tokens=self.tokens, temperature=0.0, ignore_eos=True)

        def emit(prompt: int, delta: object) -> None:
            first.append(time.perf_counter())
            left[0] -= getattr(delta, "finish_reason", None) is not None
            if not left[0]:
                ended.set()

        start_s = time.perf_counter()
        prepared: list[PreparedPrompt] = [self.engine.prepare(prompt, params) for prompt in self.prompts]
        self.engine.submit(prepared, emit)
        ended.wait()
        return first[0] - start_s, time.perf_counter() - start_s

    def served(self) -> Times:
        """Send the prompts over separate connections, and discard the answers."""
        first: list[float] = []
        start_s = time.perf_counter()
        asked = [threading.Thread(target=self._ask, args=(prompt, first)) for prompt in self.prompts]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join()
        return min(first) - start_s, time.perf_counter() - start_s

    def _ask(self, prompt: str, first: list[float]) -> None:
        fields = {"max_tokens": self.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps({"prompt": prompt, **fields}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n"
        head += f"Content-Length: {len(body)}"
        with socket.create_connection(self.address) as sock:
            sock.sendall(head.encode() + b"\r\n\r\n" + body)
            data = b""
            while piece := sock.recv(1 << 16):
                if b"data: {" not in data[:4096] and b"data: {" in data[:4096] + piece:
                    first.append(time.perf_counter())
                data += piece
        assert data.count(b'"finish_reason": "length"') == 1 and b"data: [DONE]" in data, data[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in (("--batch", 16), ("--tokens", 512), ("--rounds", 16)):
        parser.add_argument(option, type=at_least(1), default=default)
    args = parser.parse_args()
    with SpecEngine("tiny", draft="none", prefix_cache=False) as engine, Live(*OPTIONS) as live:
        rows = Rows(engine, live, args.batch, args.tokens)
        bare, served = _in_turn(rows, args.rounds)
    _show("first token", [first_s for first_s, _ in bare], [first_s for first_s, _ in served])
    per_token = [[whole_s / args.tokens for _, whole_s in each] for each in (bare, served)]
    _show("a token of each row", *per_token)


def _in_turn(rows: Rows, rounds: int) -> tuple[list[Times], list[Times]]:
    """Alternate between both; the first round is a warm-up."""
    bare: list[Times] = []
    served: list[Times] = []
    for _ in range(rounds + 1):
        for times, run in ((bare, rows.bare), (served, rows.served)):
            times.append(run())
            time.sleep(PAUSE_S)
    return bare[1:], served[1:]


def _show(what: str, bare: Sequence[float], served: Sequence[float]) -> None:
    ms = [statistics.median(times) * 1e3 for times in (bare, served)]
    ratios = sorted(own / other for own, other in zip(served, bare, strict=True))
    apart_ms = statistics.median(own - other for own, other in zip(served, bare, strict=True)) * 1e3
    print(
        f"{what}: bare {ms[0]:.2f} ms, served {ms[1]:.2f}; in the same round {apart_ms:+.2f} ms, "
        f"{statistics.median(ratios):.3f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
