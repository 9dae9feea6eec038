"""One streamed answer as a client sees it: its tokens and their arrival times."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from specdec.http.client import DONE, event_data, reason

EXCERPT = 200
"""Maximum characters of a server's error message."""


@dataclass(slots=True)
class StreamedReply:
    """The result of one request, filled in as it streams; all times are from one clock."""

    start_s: float
    """When it was due."""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    came: list[tuple[float, int]] = field(default_factory=list)
    """Arrival times, with the number of tokens at each."""
    cached_tokens: int = 0
    """Cached prompt tokens, as reported by the answering server."""
    failure: str | None = None

    @property
    def first_s(self) -> float:
        return self.came[0][0] - self.start_s

    @property
    def inter_token_s(self) -> float | None:
        """Return the mean inter-token time after the first chunk."""
        (first_s, first), (last_s, _) = self.came[0], self.came[-1]
        return (last_s - first_s) / (len(self.ids) - first) if len(self.ids) > first else None

    def token_s(self, until_s: float = math.inf) -> list[float]:
        """Return each token's time after the first chunk, up to a time; a chunk's tokens share its gap."""
        came = [(now, count) for now, count in self.came if now <= until_s]
        gaps = ((now - before, count) for (before, _), (now, count) in pairwise(came))
        return [gap_s / count for gap_s, count in gaps for _ in range(count)]

    def take(self, event: Mapping[str, Any], now_s: float) -> None:
        """Add one event of the stream."""
        if error := event.get("error"):
            self.failure = f"error in the stream: {error.get('message', error)}"
        for choice in event.get("choices") or []:
            self.text += choice.get("text") or ""
            if ids := choice.get("token_ids"):
                self.ids += ids
                self.came.append((now_s, len(ids)))
        if usage := event.get("usage"):
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def stream(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], reply: StreamedReply
) -> None:
    """Request a completion, and fill in the reply as it streams; failures become part of it."""
    asked = {**body, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    try:
        async with session.post(f"{url}/v1/completions", json=asked) as answer:
            if answer.status != 200:
                reply.failure = f"HTTP {answer.status}: {(await answer.text())[:EXCERPT]}"
                return
            async for data in event_data(answer):
                if data == DONE:
                    break
                reply.take(json.loads(data), time.perf_counter())
        if not reply.ids and reply.failure is None:
            reply.failure = "the stream ended without a token"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reply.failure = reason(error)
