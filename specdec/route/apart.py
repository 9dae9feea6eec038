"""Requests whose prompts one replica reads and whose answers another one writes: what is sent to both.

By vLLM's protocol they are asked one after the other: the first one's answer says where the second finds
what was read. By SGLang's both are asked at once, and meet in a room at the first one's side channel.
"""

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from specdec.ray.choose import Choice
from specdec.ray.prompts import Prompt
from specdec.ray.spans import count_elements, fields_of, with_fields
from specdec.ray.upstream import REFUSED, Late, Lost, Sent, TooLong, Unreached
from specdec.route.addresses import Address, Role
from specdec.route.relay import Attempts, Call, asked, late, pass_on
from specdec.route.replicas import Replica

PATHS = {"/v1/completions", "/v1/chat/completions"}
READ_BY_DECODE = ("echo", "prompt_logprobs")
"""Fields of requests whose prompts decode must read itself, unless they say no."""
NO = {b"false", b"null"}
MOST_ROOMS = 1024
"""Prompts of a request that are read apart; replicas take 256, if nothing else was set."""
PARAMS = "kv_transfer_params"
WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's proxies ask of the one that reads."""
ROOM_BITS = 63
SEVERAL = re.compile(rb'\[\s*["\[]')
"""How a list of prompts begins: of texts, or of lists of token ids."""
T = TypeVar("T")


def is_worth_it(call: Call) -> bool:
    """Return whether another replica is to prefill a prompt, and can."""
    config, fleet, prompt = call.state.config, call.state.fleet, call.prompt
    if call.sent.method != "POST" or call.request.path not in PATHS or not prompt.fields:
        return False
    if PARAMS in prompt.fields or "bootstrap_room" in prompt.fields:
        return False  # who sent it has a prefill of its own
    said = (prompt.fields[name] for name in READ_BY_DECODE if name in prompt.fields)
    if any(prompt.body[slice(*span)] not in NO for span in said):
        return False
    if (_prompts(prompt) or 1) > MOST_ROOMS:
        return False
    known = max((own.known.hit(prompt) for own in fleet.up(Role.DECODE, Role.BOTH)), default=0)
    return bool(fleet.up(Role.PREFILL)) and prompt.size - known >= config.prefill_min_bytes


async def pass_on_apart(call: Call) -> web.StreamResponse:
    """Prefill the prompt on one replica and write the answer with another."""
    if call.state.config.pd_protocol == "sglang":
        return await _at_once(call)
    return await _in_turn(call)


def decoders(call: Call) -> Attempts:
    return Attempts(call.state, call.prompt, Role.DECODE, Role.BOTH)


async def _in_turn(call: Call) -> web.StreamResponse:
    """Ask by vLLM's protocol. Where no replica prefills the prompt, the decode replica does."""
    read = await _read_first(call)
    if isinstance(read, web.StreamResponse):
        return read
    call.state.metrics.apart.labels(reader="prefill" if read else "decode").inc()
    if read:
        body, fields = call.prompt.body, call.prompt.fields or {}
        call.sent = call.sent._replace(body=with_fields(body, fields, {PARAMS: read}))
    return await pass_on(call, decoders(call))


async def _read_first(call: Call) -> bytes | web.StreamResponse | None:
    """Prefill the prompt; return where it is, or the response that says what is wrong with it."""
    state = call.state
    attempts = Attempts(state, call.prompt, Role.PREFILL)
    sent = call.sent._replace(body=_reading(call.prompt), headers=call.sent.headers.copy())
    while choice := attempts.next():
        try:
            async with asked(state, choice, call.prompt, sent) as (answer, flight):
                if answer.status == 200:
                    whole = await answer.whole()
                    flight.has_read()
                    return _params(whole)
                if answer.status < 500 and answer.status not in REFUSED:
                    return await call.relay(choice.replica, answer)
                await attempts.refused(choice.replica, answer)
        except (Unreached, Lost) as error:
            attempts.failed(choice.replica, error)
        except Late:
            raise late(state) from None
        except TooLong:
            return None
    return None


def _reading(prompt: Prompt) -> bytes:
    """Return the body for the replica that reads: it writes one token at most, and says where the rest is."""
    assert prompt.fields
    changes = {"max_tokens": b"1", "stream": b"false", PARAMS: json.dumps(WANTED).encode()}
    others = {"max_completion_tokens": b"1", "stream_options": b"null", "min_tokens": b"0"}
    changes |= {name: value for name, value in others.items() if name in prompt.fields}
    return with_fields(prompt.body, prompt.fields, changes)


def _params(answer: bytes) -> bytes | None:
    """Find where the prompt lies, to be handed on as it is."""
    try:
        fields = fields_of(answer)
    except (ValueError, RecursionError):
        return None
    found = answer[slice(*fields[PARAMS])] if PARAMS in fields else b"null"
    return None if found == b"null" else found


async def _at_once(call: Call) -> web.StreamResponse:
    """Ask by SGLang's protocol; who does not begin is replaced, and both are asked anew in another room."""
    readers, writers = Attempts(call.state, call.prompt, Role.PREFILL), decoders(call)
    reader, writer = readers.next(), writers.next()
    while reader and writer:
        answered = await _both(call, reader, writer, readers, writers)
        if isinstance(answered, web.StreamResponse):
            return answered
        if answered is Role.PREFILL:
            reader = readers.next()
        else:
            writer = writers.next()
    if writer is None:
        return writers.failure()
    writers.tried.remove(writer.replica)  # nothing was wrong with it: it prefills the prompt itself
    call.state.metrics.apart.labels(reader="decode").inc()
    return await pass_on(call, writers)


async def _both(
    call: Call, reader: Choice[Replica], writer: Choice[Replica], readers: Attempts, writers: Attempts
) -> web.StreamResponse | Role:
    """Ask both at once, and hand the writer's answer on. Return the role of the one that did not begin."""
    sent = call.sent._replace(body=_with_room(call.prompt, reader.replica.address))
    async with (
        contextlib.AsyncExitStack() as stack,
        _task(_drain(call, reader, sent)) as reading,
        _task(stack.enter_async_context(asked(call.state, writer, call.prompt, sent))) as beginning,
    ):
        await asyncio.wait({reading, beginning}, return_when=asyncio.FIRST_COMPLETED)
        if not beginning.done():
            if error := reading.result():
                readers.failed(reader.replica, error)
                return Role.PREFILL
            await asyncio.wait({beginning})
        try:
            answer, _ = beginning.result()
        except (Unreached, Lost) as error:
            writers.failed(writer.replica, error)
            return Role.DECODE
        except Late:
            raise late(call.state) from None
        if answer.status in REFUSED:
            await writers.refused(writer.replica, answer)
            return Role.DECODE
        call.state.metrics.apart.labels(reader="prefill").inc()
        return await call.relay(writer.replica, answer)


async def _drain(call: Call, reader: Choice[Replica], sent: Sent) -> Unreached | Lost | None:
    """Prefill the prompt, and read the response to its end; return why that did not begin."""
    try:
        async with asked(call.state, reader, call.prompt, sent) as (answer, _):
            if answer.status in REFUSED or answer.status >= 500:
                return Lost(f"it answered {answer.status}")
            async for _piece in answer.pieces():
                pass
    except (Unreached, Lost) as error:
        return error
    except Late:
        return Lost("it has sent nothing")
    return None


def _with_room(prompt: Prompt, reader: Address) -> bytes:
    """Return the body for both, with where they meet: a room for each prompt."""
    assert prompt.fields
    count = _prompts(prompt)
    place = {"bootstrap_host": reader.host, "bootstrap_port": reader.bootstrap_port}
    told: dict[str, Any] = {**place, "bootstrap_room": secrets.randbits(ROOM_BITS)}
    if count is not None:
        told = {name: [value] * count for name, value in place.items()}
        told["bootstrap_room"] = [secrets.randbits(ROOM_BITS) for _ in range(count)]
    changes = {name: json.dumps(value).encode() for name, value in told.items()}
    return with_fields(prompt.body, prompt.fields, changes)


def _prompts(prompt: Prompt) -> int | None:
    """Count the prompts of a list of them, up to too many; None: there is one, and no list."""
    fields = prompt.fields or {}
    if "prompt" not in fields or not SEVERAL.match(prompt.body, fields["prompt"][0]):
        return None  # a text, or token ids, which may be many
    try:
        return count_elements(prompt.body, fields["prompt"][0], MOST_ROOMS)
    except ValueError:
        return None  # the replica that reads it says what is wrong


@contextlib.asynccontextmanager
async def _task(work: Coroutine[Any, Any, T]) -> "AsyncIterator[asyncio.Task[T]]":
    """Run something beside what is done in here, and end it with that."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # who wanted it has looked
