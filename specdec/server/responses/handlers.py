"""The handlers of the Responses API."""

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from specdec.core.params import PreparedPrompt
from specdec.server.answers import RequestDeadline
from specdec.server.bodies import ChatBody
from specdec.server.events import ExpectedContent
from specdec.server.failures import Failure, naming
from specdec.server.formats import Usage
from specdec.server.generate import answer_chat
from specdec.server.parse import MOST_PARTS
from specdec.server.responses.bodies import ResponseBody
from specdec.server.responses.items import Item
from specdec.server.responses.store import StoredResponse
from specdec.server.responses.tools import Toolbox
from specdec.server.responses.writer import ResponseWriter
from specdec.server.state import ServerState

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


async def respond(request: web.Request, state: ServerState) -> web.StreamResponse:
    """Answer /v1/responses."""
    deadline = RequestDeadline(state.config.request_timeout)
    body = await state.read(request, deadline, ResponseBody.read)
    served = state.named(body.model)
    caller, responses = request["caller"], state.responses
    body.store = body.store and responses.most > 0
    history = responses.history(caller, body.previous_response_id)
    if sum(response.num_items for response in history) + len(body.items) > MOST_PARTS:
        raise Failure(
            400,
            f"previous_response_id: the conversation has more than {MOST_PARTS:,} items; start a new one.",
            param="previous_response_id",
        )

    def convert() -> tuple[Toolbox, ChatBody, list[Any]]:
        toolbox = Toolbox(body.tools or ())
        chat = body.chat(_items(history), toolbox)
        return toolbox, chat, ITEMS.dump_python(body.items) if body.store else []

    with naming(body.names):
        kept_bytes = sum(response.size for response in history)
        toolbox, chat, new_items = await state.run_by_size(request, deadline, convert, kept_bytes)

    def keep(response: dict[str, Any]) -> None:
        if body.store:
            all_items = [*new_items, *ITEMS.dump_python(ITEMS.validate_python(response["output"]))]
            items, response_json = (json.dumps(value).encode() for value in (all_items, response))
            stored = StoredResponse(items, response_json, body.previous_response_id, len(all_items))
            responses.put(caller, response["id"], stored)

    def write(expected: ExpectedContent, prepared: Sequence[PreparedPrompt]) -> ResponseWriter:
        model = body.model or served.name
        return ResponseWriter(expected, Usage.of(prepared), body, toolbox, model, keep)

    ignored = [*toolbox.left_out, *body.ignored]
    return await answer_chat(request, state, served, chat, deadline, write, ignored=ignored, names=body.names)


def _items(history: Sequence[StoredResponse]) -> list[Item]:
    return [item for stored in history for item in ITEMS.validate_python(json.loads(stored.items))]


async def retrieve(request: web.Request, state: ServerState) -> web.Response:
    """Return a stored response."""
    if request.query.get("stream", "false") != "false":
        raise Failure(400, "stream: stored responses are not streamed; leave it out.", param="stream")
    stored = state.responses.get(request["caller"], request.match_info["name"])
    request["kept"].add(len(stored.response))  # a slow client has its own copy
    return web.Response(body=stored.response, content_type="application/json")


async def delete(request: web.Request, state: ServerState) -> web.Response:
    """Delete a stored response."""
    name = request.match_info["name"]
    state.responses.delete(request["caller"], name)
    return web.json_response({"id": name, "object": "response", "deleted": True})
