"""Ask replicas until one begins to answer, and hand its answer on piece by piece."""

import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from specdec.ray.choose import Choice
from specdec.ray.load import Flight
from specdec.ray.prompts import Prompt
from specdec.ray.upstream import REFUSED, Answer, Late, Lost, Sent, TooLong, Unreached
from specdec.route.addresses import Role
from specdec.route.replicas import Replica
from specdec.route.state import SOON, State
from specdec.server.failures import Failure
from specdec.server.streams import read_within

logger = logging.getLogger(__name__)

MOST_LOST = 2
"""Replicas that may be lost with one request: if it is what ends them, it is not to end all."""
STORED = re.compile(rb'"id":\s*"(resp_[\w\-]{1,128})"')
"""The id of a stored response, where an answer begins."""


class Broken(ConnectionResetError):
    """An answer has begun and cannot be ended: its client's connection is closed."""


class Relayed(web.StreamResponse):
    """An answer whose head is sent with its first piece, which is there already."""

    _send_headers_immediately = False


@dataclass(slots=True)
class Call:
    """A client's request on its way to replicas."""

    state: State
    request: web.Request
    number: str
    """The request's id."""
    prompt: Prompt
    sent: Sent
    read_s: float
    """When the body was read."""

    async def relay(self, replica: Replica, answer: Answer) -> web.StreamResponse:
        """Hand an answer on; a client that reads slowly holds up the replica's, not the router's memory."""
        request, stall_s = self.request, self.state.config.stall_timeout
        headers = answer.headers
        headers.setdefault("X-Request-ID", self.number)
        response = Relayed(status=answer.status, reason=answer.response.reason, headers=headers)
        if found := STORED.search(answer.first) if request.path == "/v1/responses" else None:
            self.state.own(found[1].decode(), replica)
        async with read_within(request, stall_s):
            await response.prepare(request)
        try:
            async for piece in answer.pieces():
                async with read_within(request, stall_s):
                    await response.write(piece)
        except (Lost, Late, Unreached) as error:
            self.state.metrics.broken.labels(who="replica").inc()
            logger.warning("%s: an answer broke off: %s", replica.url, error)
            if transport := request.transport:
                transport.close()  # what was sent arrives, and then no end
            raise Broken(f"{replica.url} broke off") from error
        async with read_within(request, stall_s):
            await response.write_eof()
        return response


class Attempts:
    """Replicas that one request is sent to in turn, and why each did not begin to answer."""

    def __init__(self, state: State, prompt: Prompt, *roles: Role, only: Replica | None = None) -> None:
        self.state, self.prompt, self.roles, self.only = state, prompt, roles, only
        self.tried: list[Replica] = []
        self.refusal: web.Response | None = None
        self.lost = 0

    def next(self) -> Choice[Replica] | None:
        """Choose the next one, if another may be asked."""
        if len(self.tried) >= self.state.config.attempts or self.lost >= MOST_LOST:
            return None
        found = [self.only] if self.only else self.state.fleet.up(*self.roles)
        choice = self.state.choose(self.prompt, [own for own in found if own not in self.tried])
        if choice:
            self.tried.append(choice.replica)
        return choice

    def failed(self, replica: Replica, error: Exception) -> None:
        """Note why a replica did not begin, and have it checked."""
        why = "unreached"
        if isinstance(error, Lost):
            why, self.lost = "lost", self.lost + 1
        else:
            config = self.state.config
            replica.note_check(str(error), failures=config.failures, successes=config.successes)
        replica.wake.set()
        self.state.metrics.retried.labels(why=why).inc()
        logger.info("%s did not begin to answer: %s (%s)", replica.url, why, error)

    async def refused(self, replica: Replica, answer: Answer) -> None:
        """Keep a refusal: it is the answer if all others refuse or are gone too."""
        self.state.metrics.retried.labels(why=f"status_{answer.status}").inc()
        with contextlib.suppress(Lost, Late, TooLong):
            body = await answer.whole()
            self.refusal = web.Response(status=answer.status, headers=answer.headers, body=body)

    def failure(self) -> web.Response:
        """Return what the client is told where no replica has begun."""
        if self.refusal:
            return self.refusal
        if self.lost:
            raise Failure(502, "The replica was lost before its answer started.", code="replica_lost")
        says = (
            "No replica can be reached; try again later."
            if self.tried
            else "No replica is up; try again later."
        )
        raise Failure(503, says, code="no_replica", headers=SOON)


@contextlib.asynccontextmanager
async def asked(
    state: State, choice: Choice[Replica], prompt: Prompt, sent: Sent
) -> AsyncIterator[tuple[Answer, Flight]]:
    """Send a request to a replica; its answer has begun in here."""
    replica = choice.replica
    with replica.under_way(prompt, choice.line) as flight:
        state.metrics.sent.labels(replica=replica.url).inc()
        state.metrics.read.labels(known="yes").inc(flight.hit)
        state.metrics.read.labels(known="no").inc(prompt.size - flight.hit)
        async with state.upstream.ask(replica.url, sent) as answer:
            if answer.status not in REFUSED:
                is_error = answer.status >= 400
                took_s = flight.begun(is_error=is_error)
                if prompt.is_streamed and not is_error:
                    state.metrics.first_s.observe(took_s)
            yield answer, flight


async def pass_on(call: Call, attempts: Attempts) -> web.StreamResponse:
    """Ask one replica after the other, until one begins to answer."""
    state = call.state
    while choice := attempts.next():
        if len(attempts.tried) == 1:
            state.metrics.added_s.observe(time.perf_counter() - call.read_s)
        try:
            async with asked(state, choice, call.prompt, call.sent) as (answer, _):
                if answer.status not in REFUSED:
                    return await call.relay(choice.replica, answer)
                await attempts.refused(choice.replica, answer)
        except (Unreached, Lost) as error:
            attempts.failed(choice.replica, error)
        except Late:
            raise late(state) from None
    return attempts.failure()


def late(state: State) -> Failure:
    """Return what is said where a replica never begins."""
    return Failure(
        504,
        f"The replica has sent nothing for {state.config.answer_timeout:g} s, the router's answer_timeout.",
        code="replica_timeout",
    )
