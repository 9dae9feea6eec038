"""Watch the replicas: whether they are ready, what they say of themselves, and which there are."""

import asyncio
import logging
import os
import random

import aiohttp

from specdec.errors import ConfigError
from specdec.ray.figures import read_figures
from specdec.route.addresses import Address, look_up, read_file
from specdec.route.replicas import Replica
from specdec.route.settings import RouteConfig
from specdec.route.state import State

logger = logging.getLogger(__name__)

KEY = "SPECDEC_API_KEY"
"""The environment's key, by which replicas with keys tell the router their figures."""
MOST_FIGURES = 8 << 20
"""Bytes of a replica's figures that are read."""
SOONEST_S = 0.05
"""Seconds between two checks at least, however many requests find a replica gone."""
JITTER = 0.1
"""Part of a period by which checks are spread, so that not all replicas are asked at once."""


class Watch:
    """Checks each replica once a period, and the file of them, until it is cancelled."""

    def __init__(self, state: State, session: aiohttp.ClientSession) -> None:
        self.state, self.config, self.session = state, state.config, session
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._closed: set[str] = set()
        """Replicas of which the log says that they refuse their figures."""
        self._wrong = ""
        """What was wrong with the file or name when it was read last: it is said once."""
        self._read: list[Address] = []
        """What was in it when it was read last."""

    async def run(self) -> None:
        """Watch."""
        async with asyncio.TaskGroup() as group:
            for replica in self.state.fleet.replicas:
                self.start(group, replica)
            while True:
                await asyncio.sleep(self.config.check_period)
                await self.follow(group)

    def start(self, group: asyncio.TaskGroup, replica: Replica) -> None:
        """Check a replica from now on."""
        self._tasks[replica] = group.create_task(self._check_on(replica))

    def stop(self) -> None:
        """Check none any more."""
        for task in self._tasks.values():
            task.cancel()

    async def follow(self, group: asyncio.TaskGroup) -> None:
        """Read the file of replicas again, or look their name up; what cannot be read changes nothing."""
        config = self.config
        try:
            if config.replicas_file:
                addresses = await asyncio.to_thread(read_file, config.replicas_file, config.bootstrap_port)
            elif config.replicas_dns:
                addresses = await look_up(config.replicas_dns, config.bootstrap_port)
            else:
                return
        except ConfigError as error:
            if str(error) != self._wrong:
                logger.error("the list of replicas is unchanged: %s", error)
            self._wrong = str(error)
            return
        self._wrong = ""
        self._read, before = addresses, self._read
        if addresses != before:
            return  # it may be written just now: what is in it twice is meant
        added, removed = self.state.fleet.replace(addresses)
        for replica in added:
            logger.info("%s is new", replica.url)
            self.start(group, replica)
        for replica in removed:
            logger.info("%s was removed from the list; its requests continue", replica.url)
            replica.is_up = False
            self._tasks.pop(replica).cancel()

    async def _check_on(self, replica: Replica) -> None:
        """Check one replica again and again."""
        config = self.config
        while True:
            replica.wake.clear()
            why = await self._check(replica)
            replica.note_check(why, failures=config.failures, successes=config.successes)
            pause_s = config.check_period * random.uniform(1 - JITTER, 1 + JITTER)
            try:
                async with asyncio.timeout(pause_s):
                    await replica.wake.wait()
                    await asyncio.sleep(SOONEST_S)
            except TimeoutError:
                pass

    async def _check(self, replica: Replica) -> str | None:
        """Ask whether a replica is ready, and for its figures; return what is wrong."""
        try:
            async with asyncio.timeout(self.config.check_timeout):
                async with self.session.get(f"{replica.url}/ready") as answer:
                    if answer.status != 200:
                        return f"/ready answers {answer.status}"
                async with self.session.get(f"{replica.url}/metrics") as answer:
                    if answer.status == 200:
                        told = read_figures(await _read(answer))
                        replica.waiting, replica.arena, replica.models = told[:3]
                        replica.note_role(told.role, suits_both=self.config.pd_protocol == "vllm")
                    elif answer.status == 401 and replica.url not in self._closed:
                        self._closed.add(replica.url)
                        logger.warning(
                            "%s needs a key for /metrics: set %s to it for the router, or start the "
                            "replica with --metrics-open; its load and role are unknown",
                            *(replica.url, KEY),
                        )
        except TimeoutError:
            return f"/ready has not answered within {self.config.check_timeout:g} s"
        except aiohttp.ClientError as error:
            return str(error) or type(error).__name__
        return None


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """Read the beginning of an answer, which is all of it where it comes from a replica."""
    text = b""
    while len(text) < MOST_FIGURES and (piece := await answer.content.readany()):
        text += piece
    return text


def open_session(config: RouteConfig) -> aiohttp.ClientSession:
    """Return the connections for checks: they are not those of requests, which may all be taken."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{KEY}: it is not printable ASCII; set another one, or unset it.", field=KEY)
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else None,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4 * config.check_period),
        timeout=aiohttp.ClientTimeout(total=config.check_timeout),
        cookie_jar=aiohttp.DummyCookieJar(),
    )
