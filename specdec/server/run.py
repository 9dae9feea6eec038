"""Load the model, listen, print the address, and shut down gracefully."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from specdec.config.engine import EngineConfig
from specdec.core.stats import SpeculationCounts
from specdec.engine.engine import SpecEngine
from specdec.http.connection import LINGER_S
from specdec.server.access import Access
from specdec.server.app import build_app
from specdec.server.listen import SWITCH_S, bind, listen, say
from specdec.server.reach.reach import opened
from specdec.server.reach.role import ServerRole, resolve_role
from specdec.server.resident import ModelStatus
from specdec.server.settings import ServerConfig
from specdec.server.shares import open_models
from specdec.server.state import ServedModel, ServerState
from specdec.server.supervisor import READY, STOPPING, tell_supervisor
from specdec.server.switcher import Switcher
from specdec.server.tls import tls_context

logger = logging.getLogger(__name__)

REPORT_S = 10.0
"""Seconds between log lines about speculation."""
IDLE_S = 0.5
"""Seconds between two checks whether an idle model's grammar compiler process can be started, which takes
0.3 to 0.7 s of CPU, or a resting model's be stopped."""
WATCH_S = 1.0
"""Seconds between two checks of the engine."""
GRACE_S = 5.0
"""Seconds for requests still open after draining, and for the last step to end."""
STDERR = 2
OURS = "specdec-"
"""Prefix of our thread names."""
FAILED = 70
"""Exit code if the engine hangs or has stopped: "internal software error" in sysexits.h."""


def run(
    folders: Sequence[Path], engine_config: EngineConfig, config: ServerConfig, sock: socket.socket
) -> None:
    """Load models and serve them at a bound socket until stopped.

    Errors in the server's settings are raised before loading.
    """
    access, tls = Access(config), tls_context(config)
    role = resolve_role(config, engine_config, len(folders))
    sys.setswitchinterval(SWITCH_S)
    if access.is_open:
        logger.warning(
            "no API key is required: every client that reaches %s may send requests; give --api-key",
            config.host,
        )
    elif access.is_open_to_pages:
        logger.warning(
            "no API key is required: every page open in a browser here may send requests; give --api-key"
        )
    if role:
        bind(config.reach_host, config.reach_port, prefix="reach_").close()  # before anything is loaded
    switcher = open_models(folders, engine_config, config)
    with contextlib.closing(switcher):
        switcher.start()
        fault = asyncio.run(serve(switcher, config, sock, tls, role))
        failed = fault is not None
        is_closed = switcher.close(0 if failed else GRACE_S)
        if failed or not is_closed:
            logger.critical("ending the process: %s", fault or "a step does not end")
        else:
            logger.info("stopped")
        # A thread in a step, or compiling a grammar, cannot be stopped, and would crash during interpreter
        # finalization.
        if failed or any(thread.daemon and thread.name.startswith(OURS) for thread in threading.enumerate()):
            _leave(FAILED if failed else 0)


async def serve(
    switcher: Switcher,
    config: ServerConfig,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    role: ServerRole | None = None,
) -> str | None:
    """Serve until SIGTERM or SIGINT; then refuse new requests and drain running ones.

    A second signal stops without waiting. A permanent engine failure counts as a first signal, a failed
    server task as both. Return the failure, or None.
    """
    if role is None:
        return await _serve(ServerState(switcher, config), sock, tls)
    resident = switcher.residents[0]
    assert resident.engine
    access = Access(config)
    async with opened(role, resident.engine, resident.folder, config, access.share) as reach:
        return await _serve(ServerState(switcher, config, reach, access), sock, tls)


async def _serve(state: ServerState, sock: socket.socket, tls: ssl.SSLContext | None) -> str | None:
    """Serve with the state shared by all handlers."""
    switcher = state.switcher
    runner = web.AppRunner(build_app(state), handler_cancellation=True, shutdown_timeout=LINGER_S)
    await runner.setup()
    assert runner.server
    listener = None
    stopping, force_stop, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        (force_stop if stopping.is_set() else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        listener, address = await listen(state.connections.factory(runner.server), sock, tls)
        names = ", ".join(item.name for item in state.served)
        say(
            f"serving {names} at {address}/v1 (playground: {address}/, health: {address}/health, "
            f"metrics: {address}/metrics); Ctrl-C stops it"
        )
        tell_supervisor(READY)
        reports = [asyncio.create_task(_report(state, item)) for item in state.served]
        reports += [asyncio.create_task(_manage_grammar_process(item)) for item in state.served]
        for task in reports:
            task.add_done_callback(_log_if_failed)
        switching = switcher.run(state.access.weight)
        tasks = [asyncio.create_task(item) for item in (_watch(state, stopping), switching)]
        for task in tasks:
            task.add_done_callback(partial(_stop_if_failed, stopping, force_stop))
        await stopping.wait()
        tell_supervisor(STOPPING)
        for task in reports:
            task.cancel()
        await _drain(state, force_stop)
        broken = any(task.done() and task.exception() for task in tasks)
        for task in tasks:
            task.cancel()
        return "a task of the server has failed" if broken else switcher.fault
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            # The rest is bounded: further signals must not change it, nor the exit code.
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        faulthandler.cancel_dump_traceback_later()
        if listener:
            listener.close()
        await runner.cleanup()


def _leave(code: int) -> None:
    """Exit at once, with the log flushed."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _answers(count: int) -> str:
    return f"{count} answer{'' if count == 1 else 's'}"


async def _drain(state: ServerState, force_stop: asyncio.Event) -> None:
    """Drain running requests within the limit."""
    state.drain()
    seconds, start_s = state.config.drain_seconds, time.monotonic()
    if state.choices:
        logger.info("stopping: %g s for %s; a second signal ends at once", seconds, _answers(state.choices))
    waits = [asyncio.create_task(awaitable) for awaitable in (_idle(state), force_stop.wait())]
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if state.choices:
        took_s = time.monotonic() - start_s
        logger.warning("stopping with %s in flight after %.1f s", _answers(state.choices), took_s)
        state.end_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await state.idle.wait()


async def _idle(state: ServerState) -> None:
    """Wait until no request is in progress and other servers have released all leases."""
    await state.idle.wait()
    if state.reach:
        await state.reach.idle()


def _stop_if_failed(stopping: asyncio.Event, force_stop: asyncio.Event, task: "asyncio.Task[None]") -> None:
    """Stop the server if one of its own tasks has failed, since its clients would wait forever."""
    if not task.cancelled() and (error := task.exception()):
        logger.critical("a task of the server has failed", exc_info=error)
        stopping.set()
        force_stop.set()


def _log_if_failed(task: "asyncio.Task[None]") -> None:
    """Log the failure of an auxiliary task; the server continues."""
    if not task.cancelled() and (error := task.exception()):
        logger.error("%s has failed and is no longer done", task.get_name(), exc_info=error)


async def _watch(state: ServerState, stopping: asyncio.Event) -> None:
    """Watch the engines: fail requests of a hanging step, and stop the server when an engine fails.

    The process also exits if this task stops running because something blocks the interpreter.
    """
    limit_s, ends = state.config.step_timeout, state.config.exit_on_failure
    while not (ends and state.switcher.fault):
        if ends:
            faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=STDERR)
        await asyncio.sleep(min(WATCH_S, limit_s / 4))
        _abandon_hung(state.engines, limit_s)
    faulthandler.cancel_dump_traceback_later()
    stopping.set()


def _abandon_hung(engines: Sequence[SpecEngine], limit_s: float) -> None:
    for engine in engines:
        if engine.fault is None and engine.step_seconds > limit_s:
            logger.critical("a step of the engine has taken more than step_timeout, which is %g s", limit_s)
            engine.abandon(f"The engine hangs in a step that has taken more than {limit_s:g} s.")


async def _manage_grammar_process(served: ServedModel) -> None:
    """Start the grammar compiler of idle warm models, and end that of resting ones."""
    resident = served.resident
    while True:
        await asyncio.sleep(IDLE_S)
        engine = resident.engine
        if engine and engine.tokenizer and resident.is_sound and not resident.gate.users:
            if resident.is_warm:
                engine.start_grammar_process()
            elif resident.status is ModelStatus.RESTING:
                engine.stop_grammar_process()
        del engine  # allow unloading meanwhile


async def _report(state: ServerState, served: ServedModel) -> None:
    """Log a model's activity since the last line, if any."""
    prefix = f"{served.name}: " if len(state.served) > 1 else ""
    previous = ServingTotals.of(None)
    while True:
        await asyncio.sleep(REPORT_S)
        # Keep no reference to the engine, so that it can be unloaded meanwhile.
        previous = _report_since(previous, served.resident.engine, prefix)


class ServingTotals(NamedTuple):
    """Counts at a time."""

    steps: int
    tokens: int
    drafted: int
    accepted: int
    at_s: float
    counts: SpeculationCounts | None

    @classmethod
    def of(cls, counts: SpeculationCounts | None) -> "ServingTotals":
        totals = (counts.steps, counts.tokens, counts.drafted, counts.accepted) if counts else (0, 0, 0, 0)
        return cls(*totals, time.monotonic(), counts)


def _report_since(previous: ServingTotals, engine: SpecEngine | None, prefix: str) -> ServingTotals:
    """Log an engine's activity since a tally, if any; return the next tally."""
    if engine is None:
        return ServingTotals.of(None)
    current = ServingTotals.of(engine.model.loop.counts)
    base = (
        previous if previous.counts is current.counts else ServingTotals(0, 0, 0, 0, previous.at_s, None)
    )  # reloaded
    steps, tokens = current.steps - base.steps, current.tokens - base.tokens
    drafted, accepted = current.drafted - base.drafted, current.accepted - base.accepted
    if steps:
        stats = engine.stats()
        logger.info(
            "%srunning %d, waiting %d; %.1f tokens/s; acceptance length %.2f, %d of %d accepted (%.0f %%)",
            *(prefix, stats.running, stats.waiting, tokens / (current.at_s - base.at_s), tokens / steps),
            *(accepted, drafted, 100 * accepted / drafted if drafted else 0.0),
        )
    return current
