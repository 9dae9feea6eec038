"""Either side of a pair is killed or paused at random times.

`python -m tests.server.reach.faults` sends 200 requests meanwhile and prints the results.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.server.live import Live, total
from tests.server.reach.pairs import EXACT, SECRET, free_port
from tests.server.reach.proxies import NOTHING_YET

ANSWER = 12
LONGEST_S = 120.0
"""A request that takes this long hangs."""
SETTLES_S = 150.0
"""Quarantine may take 120 s, and leases of dead peers 30."""
KINDS = ("kill", "stop")
Ids = list[int]


class Side:
    """One server, which a supervisor restarts at the same address."""

    def __init__(self, role: str, model: str, options: Sequence[str], env: Mapping[str, str]) -> None:
        self.role, self.reach_port = role, free_port()
        self._make = lambda: Live(
            *(*EXACT, "--port", str(self._port), "--role", role, "--reach-port", str(self.reach_port)),
            *options,
            model=model,
            env=SECRET | env,
        )
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.lives: list[Live] = []

    @property
    def live(self) -> Live:
        return self.lives[-1]

    def start(self) -> None:
        self.lives.append(self._make().__enter__())

    def stop(self) -> None:
        for live in self.lives:
            if live.process.poll() is None:
                live.process.send_signal(signal.SIGCONT)
            live.stop()

    def signal(self, number: int) -> None:
        if self.live.process.poll() is None:
            self.live.process.send_signal(number)

    def revive(self) -> bool:
        """Restart it if it has died; return whether it had."""
        if self.live.process.poll() is None:
            return False
        self.start()
        return True

    def said(self) -> str:
        return "".join(line for live in self.lives for line in live.said)


@dataclass(slots=True)
class Report:
    """The results of all requests, and of the servers."""

    ended: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_s: dict[str, float] = field(default_factory=dict)
    """The longest wait by outcome."""
    fetches: Counter[str] = field(default_factory=Counter)
    """Outcomes of fetches, from the decode instances that were queried before they ended."""
    left: dict[str, Any] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    """Server exits that this test did not cause."""


class Siege:
    """Send requests through a pair while its servers are killed and paused."""

    def __init__(self, prefill: Side, decode: Side, prompts: Sequence[Ids], seed: int) -> None:
        self._prefill, self._decode, self._prompts = prefill, decode, prompts
        self._rng = random.Random(seed)
        self._expected: list[list[int]] = []
        self._stale: list[dict[str, Any]] = []
        self._answered = 0
        self.report = Report()

    async def run(self, requests: int, at_once: int, faults: Sequence[tuple[str, Side]]) -> Report:
        """Send requests concurrently until enough were answered and all faults have happened."""
        limit = aiohttp.ClientTimeout(total=LONGEST_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as self._http:
            for prompt in self._prompts:
                status, answer = await self._ask(self._decode.url, self._body(prompt))
                assert status == 200, answer
                self._expected.append(_ids(answer))
            assert len({*map(tuple, self._expected)}) == len(self._prompts)
            harm = asyncio.create_task(self._harm(faults))
            await asyncio.gather(*(self._work(requests, harm) for _ in range(at_once)))
            await harm
        for side in (self._prefill, self._decode):
            await asyncio.to_thread(side.revive)
        self._note_fetches()
        self.report.left = await asyncio.to_thread(self._settled)
        return self.report

    async def _work(self, requests: int, harm: "asyncio.Task[None]") -> None:
        while self._answered < requests or not harm.done():
            way = self._rng.choice((self._proxied, self._proxied, self._met, self._met, self._late))
            place, start_s = self._rng.randrange(len(self._prompts)), time.monotonic()
            try:
                status, answer = await way(self._body(self._prompts[place]))
                ended, self._answered = str(status), self._answered + 1
                if status == 200 and _ids(answer) != self._expected[place]:
                    self.report.wrong.append(f"{way.__name__}: {_ids(answer)}, not {self._expected[place]}")
                if status not in (200, 429, 503):
                    self.report.wrong.append(f"{way.__name__}: {status} {answer!r:.300}")
            except TimeoutError:
                ended = "hangs"
                self.report.wrong.append(f"{way.__name__}: no answer in {LONGEST_S} s")
            except (aiohttp.ClientError, OSError) as error:
                ended = type(error).__name__
                await asyncio.sleep(0.5)
            waited_s = time.monotonic() - start_s
            self.report.ended[f"{way.__name__}: {ended}"] += 1
            self.report.longest_s[ended] = max(waited_s, self.report.longest_s.get(ended, 0.0))

    async def _harm(self, faults: Sequence[tuple[str, Side]]) -> None:
        """Inject one fault after another; a dead server is restarted at the same address."""
        for kind, side in faults:
            await asyncio.sleep(self._rng.uniform(0.2, 2.5))
            self._note_deaths()
            for own in (self._prefill, self._decode):
                await asyncio.to_thread(own.revive)
            self.report.faults[f"{kind} {side.role}"] += 1
            if kind == "kill":
                if side is self._decode:
                    await asyncio.to_thread(self._note_fetches)
                side.signal(signal.SIGKILL)
                await asyncio.to_thread(side.live.process.wait)
                await asyncio.to_thread(side.revive)
            else:
                side.signal(signal.SIGSTOP)
                await asyncio.sleep(self._rng.choice((0.5, 3.0, 9.0)))
                side.signal(signal.SIGCONT)

    def _note_deaths(self) -> None:
        for side in (self._prefill, self._decode):
            if (code := side.live.process.poll()) is not None:
                self.report.deaths[f"{side.role}: {code}"] += 1

    def _note_fetches(self) -> None:
        for key, value in self._decode.live.metrics().items():
            if key.startswith("specdec:reach_fetches_total"):
                self.report.fetches[key.split('outcome="')[1].split('"')[0]] += int(value)

    async def _proxied(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Send a request as vLLM's proxies do; an error of the prefill instance is an error of the proxy."""
        asked = body | {"max_tokens": 1, "kv_transfer_params": NOTHING_YET}
        status, answer = await self._ask(self._prefill.url, asked)
        if status != 200:
            return status, answer
        params = answer["kv_transfer_params"]
        self._stale = [*self._stale[-8:], params]
        return await self._ask(self._decode.url, body | {"kv_transfer_params": params})

    async def _met(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Send a request as SGLang's routers do, without waiting for the prefill instance's answer."""
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._prefill.reach_port}
        asked = body | place | {"bootstrap_room": self._rng.getrandbits(63)}
        read = asyncio.create_task(self._ask(self._prefill.url, asked))
        try:
            return await self._ask(self._decode.url, asked)
        finally:
            read.cancel()
            with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, OSError):
                await read

    async def _late(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Use another request's lease, whose server may have died since."""
        params = {"kv_transfer_params": self._rng.choice(self._stale)} if self._stale else {}
        return await self._ask(self._decode.url, body | params)

    def _body(self, prompt: Ids) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "max_tokens": ANSWER,
            "temperature": 1.0,
            "seed": 5,
            "ignore_eos": True,
            "cache_salt": f"{self._rng.getrandbits(64):x}",
            "return_token_ids": True,
        }

    async def _ask(self, url: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        async with self._http.post(f"{url}/v1/completions", json=body) as answer:
            return answer.status, json.loads(await answer.read())

    def _settled(self) -> dict[str, Any]:
        """Wait until nothing is held, quarantined or in flight, and memory was checked again."""
        until_s, found = time.monotonic() + SETTLES_S, dict[str, Any]()
        sides = (self._prefill, self._decode)
        before = {side.role: side.live.ask("/server_info").json["clean_checks"] for side in sides}
        for side in sides:  # an engine checks its memory when it becomes idle
            assert side.live.ask("/v1/completions", self._body(self._prompts[0])).status == 200
        while time.monotonic() < until_s:
            for side in sides:
                figures, info = side.live.metrics(), side.live.ask("/server_info").json
                names = ("leases", "fetching", "holds", "quarantined", "quarantined_bytes", "rooms_waiting")
                held = {own: total(figures, f"specdec:reach_{own}") for own in names}
                held |= {own: info[own] for own in ("running", "waiting", "failed_steps")}
                held["used"] = sum(info["arena"][f"{own}_bytes"] for own in ("block", "state", "record"))
                held["unproved"] = info["clean_checks"] <= before[side.role]
                found[side.role] = {name: value for name, value in held.items() if value}
            if not any(found.values()):
                return {}
            time.sleep(0.5)
        return found


def _ids(answer: Mapping[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


@contextlib.contextmanager
def sides(model: str, env: Mapping[str, str]) -> Iterator[tuple[Side, Side]]:
    """Start both servers, and stop all their successors at the end."""
    prefill = Side("prefill", model, (), env)
    decode = Side("decode", model, ("--reach-peers", f"127.0.0.1:{prefill.reach_port}"), env)
    try:
        prefill.start()
        decode.start()
        yield prefill, decode
    finally:
        prefill.stop()
        decode.stop()


def draw(count: int, lengths: range, vocab: int, seed: int) -> list[Ids]:
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab) for _ in range(rng.choice(lengths))] for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tcp", action="store_true", help="not by shared memory")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with sides(args.model, {"UCX_TLS": "tcp,self"} if args.tcp else {}) as both:
        kinds = [(KINDS[i % 2], both[i // 2 % 2]) for i in range(args.faults)]
        rng.shuffle(kinds)
        siege = Siege(*both, draw(10, range(100, 600), 256, args.seed), args.seed)
        report = asyncio.run(siege.run(args.requests, args.at_once, kinds))
        said = "".join(side.said() for side in both)
    faulty = [line for line in said.splitlines() if "Traceback" in line or "CRITICAL" in line]
    print(
        f"faults {dict(report.faults)}, {len(faulty)} lines of faults in the logs; ended by themselves "
        f"{dict(report.deaths)}"
    )
    print(f"{report.ended.total()} requests: {dict(sorted(report.ended.items()))}")
    print(f"longest waits, seconds: { {name: round(value, 1) for name, value in report.longest_s.items()} }")
    print(f"fetches: {dict(report.fetches)}; left: {report.left}")
    print(*report.wrong[:20], *faulty[:20], sep="\n")
    return int(bool(report.wrong or report.left))


if __name__ == "__main__":
    sys.exit(main())
