"""Two servers behind a router: the published sglang-router, and the protocol of vLLM's toy proxy."""

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from tests.server.live import Live
from tests.server.reach.pairs import EXACT, SECRET, free_port
from tests.server.reach.proxies import toy_prefill

START_S = 60.0
SGLANG_ROUTER = """
import argparse, sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser, use_router_prefix=False, exclude_host_port=False)
Router.from_args(RouterArgs.from_cli_args(parser.parse_args(), use_router_prefix=False)).start()
"""
"""The router's own command without its process-title dependency."""


@dataclass(frozen=True)
class Pair:
    """A prefill instance, a decode instance, and the port of the former's side channel."""

    prefill: Live
    decode: Live
    port: int


@contextmanager
def paired(
    *options: str, model: str = "tiny", key: str | None = None, entry: str = "specdec.cli"
) -> Iterator[Pair]:
    """Start two servers that share a secret."""
    with ExitStack() as stack:
        own = (
            *EXACT,
            "--reach-port",
            "0",
            "--drain-seconds",
            "1",
            *options,
            *(("--api-key", key) if key else ()),
        )
        prefill = stack.enter_context(Live(*own, "--role", "prefill", model=model, entry=entry, env=SECRET))
        port = int(prefill.ask("/server_info", **authorized(key)).json["disaggregation_bootstrap_port"])
        own += ("--role", "decode", "--reach-peers", f"127.0.0.1:{port}")
        yield Pair(prefill, stack.enter_context(Live(*own, model=model, entry=entry, env=SECRET)), port)


def authorized(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def sglang_router(pair: Pair, *options: str) -> AbstractContextManager[str]:
    """Start sglang-router with both servers."""
    own = ("--pd-disaggregation", "--prefill", pair.prefill.url, str(pair.port), "--decode", pair.decode.url)
    return started_sglang_router(*own, "--policy", "round_robin", *options)


@contextmanager
def started_sglang_router(*options: str) -> Iterator[str]:
    """Start sglang-router, wait until it has registered its servers, and yield its URL."""
    port = free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    arguments += ["--worker-startup-timeout-secs", "30"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SGLANG_ROUTER, *arguments, *options], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _wait(f"http://127.0.0.1:{port}/readiness", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(START_S)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError("the router does not become ready")


class ToyProxy:
    """The disagg_proxy of vLLM's NIXL tests: the prefill instance's answer goes to the decode instance."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/{kind:.*}", self._relay)
        app.cleanup_ctx.append(self._session)
        return app

    async def _session(self, app: web.Application):  # type: ignore[no-untyped-def]
        async with aiohttp.ClientSession() as self._http:
            yield

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        headers = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
        asked = toy_prefill(body)
        async with self._http.post(
            self._pair.prefill.url + request.path, json=asked, headers=headers
        ) as read:
            if read.status != 200:
                return web.Response(
                    status=read.status, body=await read.read(), content_type=read.content_type
                )
            body["kv_transfer_params"] = (await read.json()).get("kv_transfer_params")
        async with self._http.post(
            self._pair.decode.url + request.path, json=body, headers=headers
        ) as written:
            response = web.StreamResponse(
                status=written.status, headers={"Content-Type": written.headers["Content-Type"]}
            )
            await response.prepare(request)
            async for piece in written.content.iter_any():
                await response.write(piece)
            return response


@contextmanager
def toy_proxy(pair: Pair) -> Iterator[str]:
    """Serve the proxy in a separate thread; yield its URL."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    urls: list[str] = []

    async def serve(over: asyncio.Event) -> None:
        runner = web.AppRunner(ToyProxy(pair).app(), handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port := free_port())
        await site.start()
        urls.append(f"http://127.0.0.1:{port}")
        ready.set()
        await over.wait()
        await runner.cleanup()

    over = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(over),))
    thread.start()
    try:
        assert ready.wait(START_S)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
