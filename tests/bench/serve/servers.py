"""Servers with the dialects of vLLM, SGLang and llama.cpp, and typical faults."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PIECES = ("Once", " upon", " a time")
TOKENS = 7
"""Token count of every complete response, in three pieces of text."""

Event = dict[str, Any] | str


@dataclass
class FakeServer:
    """A server that answers every request alike, except those whose number is in `faults`."""

    dialect: str
    faults: dict[int, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answered: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    def routes(self) -> list[web.RouteDef]:
        """List the server's routes."""
        posts = [web.post(f"/v1/{path}", self._complete) for path in ("completions", "chat/completions")]
        return [web.get("/v1/models", self._models), web.get("/metrics", self._metrics), *posts]

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": f"{self.dialect}-model"}, {"id": "other"}]}
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        texts = {"vllm": self._vllm_metrics(), "sglang": self._sglang_metrics()}
        if self.dialect not in texts:
            return web.json_response({"error": {"code": 501, "message": "no metrics here"}}, status=501)
        return web.Response(text=texts[self.dialect])

    def _vllm_metrics(self) -> str:
        """Count four drafts of three tokens a request; 3, 2 and 1 of them were accepted by depth."""
        names = {"drafts": 4, "draft_tokens": 12, "accepted_tokens": 6}
        label = 'engine="0",model_name="a \\"quoted} name"'
        lines = ["# HELP vllm:spec_decode_num_drafts Number of spec decoding drafts."]
        for name, each in names.items():
            lines.append(f"vllm:spec_decode_num_{name}_total{{{label}}} {float(1000 + each * self.answered)}")
            lines.append(f"vllm:spec_decode_num_{name}_created{{{label}}} 1.7e+09")
        for position, each in enumerate((3, 2, 1)):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{{label},position="{position}"}} {float(500 + each * self.answered)}')
        return "\n".join(lines)

    def _sglang_metrics(self) -> str:
        length = 2.75 if self.answered else 0.0
        name = "sglang:spec_accept_length"
        return "\n".join(
            [
                f"# TYPE {name} gauge",
                *(f'{name}{{dp_rank="{r}"}} {length * (r < 2)}' for r in range(3)),
                "other NaN",
            ]
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body, number = await request.json(), len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answer(request, body, self.faults.get(number, ""))
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], fault: str) -> web.StreamResponse:
        if self.dialect == "bare" and "stream_options" in body:
            return web.json_response({"detail": "unknown field stream_options"}, status=422)
        if self.dialect == "strict" and "cache_salt" in body:
            words = "Unrecognized request argument supplied: cache_salt"
            return web.json_response({"error": {"message": words}}, status=400)
        if fault == "busy":
            return web.json_response({"error": {"message": "too  busy", "code": 503}}, status=503)
        if fault == "locked":
            return web.json_response({"error": {"message": "no such key", "code": 401}}, status=401)
        if fault == "plain":
            return web.json_response({"choices": [{"text": "all at once"}]})
        if fault == "hang":
            await asyncio.sleep(3600)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for place, event in enumerate(self._events(body, fault)):
            text = event if isinstance(event, str) else f"data: {json.dumps(event)}\r\n\r\n"
            if fault == "die" and place == 2:
                assert request.transport is not None
                request.transport.abort()
                return reply
            # In two writes, because a network may split a stream anywhere.
            await reply.write(text[:9].encode())
            await asyncio.sleep(0.001)
            await reply.write(text[9:].encode())
        self.answered += 1
        if self.dialect == "llama.cpp" and request.transport:
            # It announces keep-alive, then closes: another request on the connection is lost.
            asyncio.get_running_loop().call_later(0.002, request.transport.close)
        return reply

    def _events(self, body: dict[str, Any], fault: str) -> Iterator[Event]:
        """Yield the events of one stream."""
        chat = "messages" in body
        yield ": a comment\n\n"
        if chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        for piece in PIECES:
            said = {"delta": {"content": piece}} if chat else {"text": piece}
            yield {"choices": [{"index": 0, **said, "finish_reason": None}], "usage": None}
            if fault == "error event":
                yield {"error": {"message": "the engine is dead", "code": 500}}
            if fault == "noise":
                yield "data: <html>\n\n"
            if fault == "cut":
                return
        end: dict[str, Any] = {"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}]}
        if self.dialect == "llama.cpp":
            end["timings"] = {"predicted_n": TOKENS, "draft_n": 6, "draft_n_accepted": 4}
        yield end
        if self.dialect in ("vllm", "sglang") and body.get("stream_options", {}).get("include_usage"):
            yield {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": TOKENS}}
        if fault != "no done":
            yield "data: [DONE]\n\n"


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Run a server in a thread until the end of the block."""
    ready, end = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        app = web.Application()
        app.add_routes(server.routes())
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await end.wait()
        await runner.cleanup()

    # Requests that hang when the block ends are cancelled by `run`.
    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loops[0].call_soon_threadsafe(end.set)
        thread.join()
