"""One request to a server: its stream with times, or its failure."""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from specdec.bench.acceptance.prompts import BenchPrompt
from specdec.http.client import DONE, event_data, reason

EXCERPT = 120
"""Maximum characters of a server's error message."""
SAYS = ("text", "content", "reasoning", "reasoning_content", "tool_calls")
"""Fields of a choice, or of its delta, that hold new content."""
KEY = "--api-key-env names the variable that holds its key: check both"
REMEDIES = {
    401: f"; {KEY}",
    403: f"; {KEY}",
    404: "; give the server's root as URL, and its model as --model",
}
"""Remedies by status, for servers whose messages lack them."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """One request's speculation counts, from its own stream."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request as a client saw it; all times are from one clock."""

    start_s: float
    """When it was sent, or its due time if earlier."""
    chunk_s: tuple[float, ...]
    """Arrival times of the text's chunks."""
    end_s: float
    tokens: int
    counted_by: str
    """`usage` or `timings` if the server counted the tokens; `chunks`: each chunk counts as one token."""
    drafts: DraftCounts | None
    failure: str | None

    @property
    def inter_token_s(self) -> float | None:
        """Return the mean inter-token time after the first token."""
        if self.tokens < 2 or len(self.chunk_s) < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.tokens - 1)


class UnusableAnswer(Exception):
    """An answer is unusable."""


@dataclass(slots=True)
class StreamedAnswer:
    """Accumulate a stream's events."""

    chunk_s: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """Token counts by source."""
    drafts: DraftCounts | None = None
    finished: bool = False

    def take(self, data: str, now_s: float) -> None:
        """Add one event; raise if it is an error, or not of this API."""
        if data == DONE:
            self.finished = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise UnusableAnswer(f"an event is no JSON: {data[:EXCERPT]}") from None
        if not isinstance(event, dict):
            raise UnusableAnswer(f"an event is no JSON object: {data[:EXCERPT]}")
        if (error := event.get("error")) or event.get("object") == "error":
            raise UnusableAnswer(f"error in the stream: {_words(error or event)}")
        choices = event.get("choices") or []
        if any(_has_text(choice) for choice in choices):
            self.chunk_s.append(now_s)
        self.finished |= any(choice.get("finish_reason") is not None for choice in choices)
        self._count(event)

    def _count(self, event: Mapping[str, Any]) -> None:
        """Record an event's counts of tokens and drafts."""
        usage, timings = event.get("usage") or {}, event.get("timings") or {}
        details = usage.get("completion_tokens_details") or {}
        accepted, rejected = (details.get(f"{what}_prediction_tokens") for what in ("accepted", "rejected"))
        if (tokens := usage.get("completion_tokens")) is not None:
            self.counts["usage"] = int(tokens)
        if (tokens := timings.get("predicted_n")) is not None:
            self.counts["timings"] = int(tokens)
        if accepted is not None and rejected is not None and accepted + rejected:
            self.drafts = DraftCounts(int(accepted + rejected), int(accepted))
        if timings.get("draft_n"):
            self.drafts = DraftCounts(int(timings["draft_n"]), int(timings.get("draft_n_accepted", 0)))

    def outcome(self, start_s: float, failure: str | None) -> RequestOutcome:
        """Finish the answer now."""
        end_s = time.perf_counter()
        if failure is None and not self.finished:
            failure = "the stream ended before its finish reason"
        by = next((name for name in ("usage", "timings") if name in self.counts), "chunks")
        tokens = self.counts.get(by, len(self.chunk_s))
        return RequestOutcome(start_s, tuple(self.chunk_s), end_s, tokens, by, self.drafts, failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTemplate:
    """The parameters of every request."""

    model: str
    chat: bool
    max_tokens: int
    temperature: float
    ignore_eos: bool

    def body(self, prompt: BenchPrompt, seed: int) -> dict[str, Any]:
        """Return the JSON body of a streamed request."""
        if self.chat:
            user = {"role": "user", "content": prompt.text}
            asked: dict[str, Any] = {"messages": list(prompt.messages) or [user]}
        else:
            asked = {"prompt": prompt.text if prompt.token_ids is None else list(prompt.token_ids)}
        body = {
            "model": self.model,
            **asked,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": seed,
            "stream": True,
        }
        return body | {"ignore_eos": True} if self.ignore_eos else body


COUNTING, SALT = "stream_options", "cache_salt"
"""Fields that some servers refuse: the request for token counts, and the cache salt."""


class ServerUnderTest:
    """A server under test; a field that it refuses once is not sent again.

    A prompt that is sent again has another salt each time, so that no prefix or look-up text left by its
    earlier answers makes later ones faster. Prompts that are sent once share a salt.
    """

    def __init__(self, session: aiohttp.ClientSession, base: str, request: RequestTemplate) -> None:
        self.session, self.base, self.request = session, base, request
        self.options = {COUNTING, SALT}
        """The optional fields that it has not refused."""
        self._run = secrets.token_hex(8)

    async def complete(
        self, prompt: BenchPrompt, seed: int, sending: int, due_s: float | None = None
    ) -> RequestOutcome:
        """Send one prompt and read the answer to its end. Failures become part of the outcome."""
        answer, failure = StreamedAnswer(), None
        start_s = time.perf_counter() if due_s is None else due_s
        body = self.request.body(prompt, seed)
        body |= {COUNTING: {"include_usage": True}, SALT: f"{self._run}-{sending}"}
        try:
            await self._send(body, answer)
        except UnusableAnswer as fault:
            failure = str(fault)
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            failure = reason(error)
        return answer.outcome(start_s, failure)

    async def metrics(self) -> str | None:
        """Return the server's Prometheus metrics; None if unavailable."""
        try:
            async with self.session.get(f"{self.base}/metrics") as reply:
                return await reply.text() if reply.status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    async def _send(self, body: Mapping[str, Any], answer: StreamedAnswer) -> None:
        body = {name: value for name, value in body.items() if name not in {COUNTING, SALT} - self.options}
        path = "/v1/chat/completions" if self.request.chat else "/v1/completions"
        async with self.session.post(f"{self.base}{path}", json=body) as reply:
            if reply.status == 200:
                return await _read(reply, answer)
            words = await reply.text(errors="replace")
        refused = {name for name in (COUNTING, SALT) if name in body and name in words}
        if reply.status in (400, 422) and refused:
            self.options -= refused
            return await self._send(body, answer)
        raise UnusableAnswer(f"HTTP {reply.status}: {_words(words)}{REMEDIES.get(reply.status, '')}")


async def _read(reply: aiohttp.ClientResponse, answer: StreamedAnswer) -> None:
    if reply.content_type == "application/json":
        raise UnusableAnswer(f"it answered without streaming: {_words(await reply.text(errors='replace'))}")
    async for data in event_data(reply):
        answer.take(data, time.perf_counter())
        if data == DONE:
            return


def _has_text(choice: Mapping[str, Any]) -> bool:
    said = choice.get("delta") or choice
    return any(said.get(name) for name in SAYS)


def _words(error: Any) -> str:
    """Extract the message of an error in any of the usual formats."""
    if isinstance(error, str):
        try:
            error = json.loads(error)
        except ValueError:
            return " ".join(error.split())[:EXCERPT] or "no reason given"
    if isinstance(error, dict):
        inner = next((error[name] for name in ("error", "message", "detail") if error.get(name)), None)
        return _words(inner) if inner else json.dumps(error)[:EXCERPT]
    return str(error)[:EXCERPT]
