"""Stand-ins for a prefill and a decode engine, which speak both router protocols."""

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

TEXT = ("a", "b", "c")


class Engine:
    """A server that answers each prompt with one event per token, and records request bodies."""

    def __init__(self, *, lends: bool = False, fetches: bool = True, text: tuple[str, ...] = TEXT) -> None:
        self.lends, self.fetches, self.text = lends, fetches, text
        self.bodies: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        if self.lends:
            return web.json_response({"choices": [], "kv_transfer_params": {"lease": len(self.bodies)}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, text in enumerate(self.text):
            await _send(response, {"choices": [{"text": text, "token_ids": [number]}]})
        await _send(
            response,
            {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": self._cached(body)}}},
        )
        await response.write(b"data: [DONE]\n\n")
        return response

    def _cached(self, body: Mapping[str, Any]) -> int:
        is_lent = "kv_transfer_params" in body or "bootstrap_room" in body
        return len(body["prompt"]) - 1 if is_lent and self.fetches else 0


async def _send(response: web.StreamResponse, event: object) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
