"""Request bodies that are cheap to send and expensive to receive: `python -m tests.server.flood URL PID`.

A bomb is 15 KB of gzip that unpacks to 15 MB; its last byte is never sent, so that the server keeps waiting.
"""

import argparse
import asyncio
import gzip
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

UNPACKED = 15 << 20
BOMB = gzip.compress(b" " * UNPACKED, 9)
SETTLED_S = 1.0
"""Seconds without growth after which memory counts as settled."""


def bomb(path: str, key: str = "") -> bytes:
    """Return a request without its last byte."""
    return head(path, len(BOMB), key, "Content-Encoding: gzip") + BOMB[:-1]


def head(path: str, length: int, key: str = "", *more: str) -> bytes:
    """Return a request's head, which announces a body."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {length}", *more]
    lines += [f"Authorization: Bearer {key}"] if key else []
    return "\r\n".join([*lines, "", ""]).encode()


def resident_mb(process: int) -> float:
    """Return a process's resident memory in MiB."""
    lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@asynccontextmanager
async def flooded(url: str, sent: bytes, count: int) -> AsyncIterator[Sequence[asyncio.StreamReader]]:
    """Send the same bytes over `count` connections, and keep them open in the block."""
    at = urlsplit(url)
    pairs = [await asyncio.open_connection(at.hostname, at.port) for _ in range(count)]
    try:
        for _, writer in pairs:
            writer.write(sent)
        for _, writer in pairs:
            await writer.drain()
        yield [reader for reader, _ in pairs]
    finally:
        for _, writer in pairs:
            writer.transport.abort()


async def settled_mb(process: int) -> float:
    """Wait until a process's memory stops growing; return the maximum."""
    most_mb, still_s, pause_s = 0.0, 0.0, 0.05
    while still_s < SETTLED_S:
        await asyncio.sleep(pause_s)
        now_mb = resident_mb(process)
        still_s = 0.0 if now_mb > most_mb + 1 else still_s + pause_s
        most_mb = max(most_mb, now_mb)
    return most_mb


async def _main(url: str, process: int, path: str, key: str, count: int) -> None:
    before_mb = resident_mb(process)
    async with flooded(url, bomb(path, key), count):
        print(f"{count} x POST {path}: {before_mb:.0f} -> {await settled_mb(process):.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("process", type=int)
    parser.add_argument("--path", default="/health")
    parser.add_argument("--key", default="")
    parser.add_argument("--count", type=int, default=100)
    own = parser.parse_args()
    asyncio.run(_main(own.url, own.process, own.path, own.key, own.count))
