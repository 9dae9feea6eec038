"""Many concurrent clients, some of them bad: the others' answers, and the server's state after all have left.

`python -m tests.server.load` starts a server of the shipped model, loads it according to the options, and
prints the results, finally as one JSON object; the exit code is 1 if anything was wrong.
"""

import argparse
import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from specdec.bench.report import environment
from tests.server.live import Live

PATH = "/v1/completions"
SHARES = {"leaves": 0.2, "malformed": 0.1, "pauses": 0.04, "deaf": 0.02}
"""Shares of special clients: hang up at a random time, are malformed, pause, or never read."""
LEAVES_S, PAUSES_S, DEAF_S, SETTLES_S = 0.6, 1.5, 300.0, 60.0
MALFORMED: Sequence[tuple[bytes, int]] = (
    (b"{", 400),
    (b"[]", 400),
    (b'{"prompt": 7}', 400),
    (b'{"prompt": "x", "temperature": "hot"}', 400),
    (b'{"prompt": "x", "max_tokens": -1}', 400),
    (b'{"prompt": "x", "model": "nobody"}', 404),
    (b'{"prompt": [123456789]}', 400),
    (b'{"prompt": "x", "logit_bias": {"x": 1}}', 400),
    (json.dumps({"prompt": "x " * 20_000}).encode(), 400),
    (b'{"prompt": "\xff"}', 400),
)
FILES = ["import os\n", "class Parser:\n    ", "def fib(n):\n    ", "x = [1, 2, 3, 1, 2, 3, 1, ", "# " * 40]


Said = tuple[str, list[int]]
"""An answer's text and tokens."""


@dataclass(frozen=True, slots=True)
class Job:
    """One client: its kind, its request, and when it leaves."""

    kind: str
    data: bytes
    status: int = 200
    after_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return self.kind in ("plain", "streamed", "pauses")


@dataclass(slots=True)
class Report:
    """The results of all clients."""

    wrong: list[str] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    tokens: int = 0


def plan(count: int, seed: int, most_tokens: int) -> list[Job]:
    """Draw the clients in random order."""
    rng = random.Random(seed)
    kinds = [kind for kind, share in SHARES.items() for _ in range(max(1, round(share * count)))]
    kinds += ["plain", "streamed"] * count
    jobs = []
    for number, kind in enumerate(kinds[:count]):
        if kind == "malformed":
            jobs.append(Job(kind, *MALFORMED[number % len(MALFORMED)]))
            continue
        body: dict[str, Any] = {
            "prompt": rng.choice(FILES) * rng.randint(1, 3),
            "max_tokens": rng.randint(2, most_tokens),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "seed": rng.getrandbits(40),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": kind != "plain",
        }
        if kind == "deaf":
            body |= {"max_tokens": 400, "n": 8, "temperature": 1.0, "logprobs": 20}
        jobs.append(Job(kind, json.dumps(body).encode(), after_s=rng.uniform(0, LEAVES_S)))
    rng.shuffle(jobs)
    return jobs


async def alone(session: aiohttp.ClientSession, jobs: Sequence[Job]) -> dict[Job, Said]:
    """Send the well-formed requests one by one, to get each one's answer alone."""
    found = {}
    for job in jobs:
        if job.is_good:
            data = json.dumps(json.loads(job.data) | {"stream": False}).encode()
            async with session.post(PATH, data=data) as answer:
                found[job] = _said([await answer.json()])
    return found


async def together(
    session: aiohttp.ClientSession,
    jobs: Sequence[Job],
    expected: Mapping[Job, Said],
    at_once: int,
) -> Report:
    """Run all clients, `at_once` concurrently."""
    report, queue = Report(), iter(jobs)
    start_s = time.perf_counter()
    await asyncio.gather(*(_work(session, queue, expected, report) for _ in range(at_once)))
    report.seconds = time.perf_counter() - start_s
    return report


async def _work(
    session: aiohttp.ClientSession,
    jobs: Iterator[Job],
    expected: Mapping[Job, Said],
    report: Report,
) -> None:
    for job in jobs:
        try:
            outcome = await _run(session, job, expected.get(job), report)
        except (aiohttp.ClientError, ConnectionError, TimeoutError, AssertionError, ValueError) as error:
            outcome = "failed"
            report.wrong.append(f"{job.kind}: {error!r:.300}")
        report.ended[f"{job.kind}: {outcome}"] += 1


async def _run(session: aiohttp.ClientSession, job: Job, expected: Said | None, report: Report) -> str:
    """Act as one client; return the outcome, and raise on a wrong one."""
    if job.kind == "deaf":
        return await _deaf(str(session._base_url), job.data)
    if job.kind == "leaves":
        try:
            async with asyncio.timeout(job.after_s):
                async with session.post(PATH, data=job.data) as answer:
                    await answer.read()
        except TimeoutError:
            return "left"
        return "was served before it left"
    async with session.post(PATH, data=job.data) as answer:
        assert answer.status == job.status, f"{answer.status} {await answer.text():.200}"
        if job.kind == "malformed":
            assert set(await answer.json()) == {"error"}
            return f"refused with {answer.status}"
        if job.kind == "pauses":
            first = await answer.content.readany()
            await asyncio.sleep(PAUSES_S)
            said = _said(_events(first + await answer.read()))
        elif job.kind == "streamed":
            said = _said(_events(await answer.read()))
        else:
            said = _said([await answer.json()])
    report.tokens += len(said[1])
    assert said == expected, f"another text than alone: {said!r:.100} instead of {expected!r:.100}"
    return "told what it is told alone"


async def _deaf(url: str, data: bytes) -> str:
    """Request a long answer and read nothing until the server hangs up."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    parts = urlsplit(url)
    await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    _, writer = await asyncio.open_connection(sock=sock, limit=512)
    head = f"POST {PATH} HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    # Unread bytes remain in the socket: only an error shows that the peer is gone.
    try:
        until_s = time.monotonic() + DEAF_S
        while not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            assert time.monotonic() < until_s, "it was waited for without end"
            await asyncio.sleep(0.1)
        return "given up"
    finally:
        writer.transport.abort()


def _events(data: bytes) -> list[Any]:
    lines = [line for line in data.decode().split("\n\n") if line]
    assert lines and lines[-1] == "data: [DONE]", f"the stream has no end: {lines[-1:]!r:.100}"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _said(parts: Sequence[Any]) -> Said:
    """Assemble an answer from its events, or from a single one."""
    errors = [part["error"] for part in parts if "error" in part]
    assert not errors, f"{errors}"
    choices = [choice for part in parts for choice in part["choices"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    return "".join(choice["text"] for choice in choices), ids


@dataclass(frozen=True, slots=True)
class Left:
    """The server's resources after all clients are gone."""

    rss_mb: float
    files: int
    info: Mapping[str, Any]

    @property
    def used_bytes(self) -> int:
        """Return the bytes held by requests; cached prefixes can be evicted."""
        return sum(self.info["arena"][name] for name in ("block_bytes", "state_bytes", "record_bytes"))

    @property
    def wrong(self) -> list[str]:
        """List resources that should have been released."""
        held = self.used_bytes
        return [f"{held} bytes are held"] * bool(held) + [
            f"{self.info[name]} {name}" for name in ("running", "waiting", "failed_steps") if self.info[name]
        ]


def settle(live: Live, checks: int) -> Left:
    """Wait until nothing runs and memory was checked again; return the rest."""
    until_s = time.monotonic() + SETTLES_S
    while True:
        info = live.ask("/server_info").json
        if not info["running"] + info["waiting"] and info["clean_checks"] > checks:
            break
        assert time.monotonic() < until_s, f"it does not come to rest: {info}"
        time.sleep(0.1)
    process = Path(f"/proc/{live.process.pid}")
    lines = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return Left(int(lines["VmRSS"].split()[0]) / 1024, len(list((process / "fd").iterdir())), info)


async def besiege(
    live: Live, *, count: int, at_once: int, rounds: int, seed: int, most_tokens: int
) -> tuple[list[Report], list[Left]]:
    """Run all requests alone, then all together in rounds; record what is left after each."""
    jobs = plan(count, seed, most_tokens)
    limit = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(
        live.url, timeout=limit, connector=connector, headers=headers
    ) as session:
        expected = await alone(session, jobs)
        left, reports = [await asyncio.to_thread(settle, live, 0)], []
        for _ in range(rounds):
            reports.append(await together(session, jobs, expected, at_once))
            left.append(await asyncio.to_thread(settle, live, left[-1].info["clean_checks"]))
    return reports, left


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help="a folder, or tiny (default: tiny)")
    add("--dtype", default="float64", help="one in which batches do not round texts (default: float64)")
    add("--requests", type=int, default=300)
    add("--at-once", type=int, default=64)
    add("--rounds", type=int, default=3, help="all again, to see whether memory grows (default: 3)")
    add("--max-tokens", type=int, default=100)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    options = ("--dtype", args.dtype, "--max-running", str(args.at_once), "--stall-timeout", "1")
    with Live(*options, model=args.model) as live:
        reports, left = asyncio.run(
            besiege(
                live,
                count=args.requests,
                at_once=args.at_once,
                rounds=args.rounds,
                seed=args.seed,
                most_tokens=args.max_tokens,
            )
        )
        code, log = live.stop()
    wrong = [line for report in reports for line in report.wrong] + [
        line for own in left for line in own.wrong
    ]
    wrong += [line for line in log.splitlines() if line.startswith(("ERROR", "CRITICAL", "Traceback"))]
    for report, own in zip(reports, left[1:], strict=True):
        print(f"{report.seconds:.1f} s, {report.tokens} tokens: {dict(sorted(report.ended.items()))}")
        print(f"  then {own.rss_mb:.0f} MB, {own.files} files, {own.info['clean_checks']} clean checks")
    print(*wrong, sep="\n")
    result = {
        "test": "load",
        **environment(),
        **vars(args),
        "wrong": len(wrong),
        "exit_code": code,
        "rss_mb": [round(own.rss_mb, 1) for own in left],
        "files": [own.files for own in left],
        "rounds": [{"seconds": round(own.seconds, 2), **own.ended} for own in reports],
    }
    print(json.dumps(result))
    return int(bool(wrong or code))


if __name__ == "__main__":
    sys.exit(main())
