"""The API key with which a router requests replicas' metrics."""

import asyncio

import pytest
from aiohttp import web

from specdec.errors import ConfigError
from specdec.route.watch import KEY
from tests.route.rig import Fake, rig, until


class Keyed(Fake):
    """A replica whose metrics require a key."""

    async def _metrics(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer given":
            return web.Response(status=401)
        return await super()._metrics(request)


def test_replicas_with_keys_tell_their_figures_by_the_routers_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(fake: Fake) -> int:
        fake.waiting = 7
        async with rig(fake) as own:
            seen = fake.checks
            await until(lambda: fake.checks > seen + 2)
            return int(own.replicas[0].waiting)

    assert asyncio.run(play(Keyed())) == 0
    assert [KEY in record.getMessage() for record in caplog.records if "/metrics" in record.getMessage()] == [
        True
    ]
    monkeypatch.setenv(KEY, "given\n")
    assert asyncio.run(play(Keyed())) == 7
    monkeypatch.setenv(KEY, "no\nkey")
    with pytest.raises(ConfigError, match=KEY):
        asyncio.run(play(Keyed()))
