"""The handlers of the Messages API."""

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from specdec.core.params import PreparedPrompt
from specdec.server.answers import RequestDeadline
from specdec.server.anthropic.bodies import CountBody, MessageBody
from specdec.server.anthropic.writer import MessageWriter
from specdec.server.bodies import ChatBody
from specdec.server.events import ExpectedContent
from specdec.server.failures import naming
from specdec.server.formats import Usage
from specdec.server.generate import answer_chat, template_settings
from specdec.server.state import ServerState


async def message(request: web.Request, state: ServerState) -> web.StreamResponse:
    """Answer /v1/messages."""
    deadline = RequestDeadline(state.config.request_timeout)
    body = await state.read(request, deadline, MessageBody.read)
    served = state.named(body.model)
    served.check_turns(len(body.messages))
    with naming(body.names):
        chat = await state.run_by_size(request, deadline, body.chat)

    def write(expected: ExpectedContent, prepared: Sequence[PreparedPrompt]) -> MessageWriter:
        return MessageWriter(expected, Usage.of(prepared), body.model or served.name)

    return await answer_chat(
        request, state, served, chat, deadline, write, ignored=body.ignored, names=body.names
    )


async def count_tokens(request: web.Request, state: ServerState) -> web.Response:
    """Count the tokens of a prompt."""
    deadline = RequestDeadline(state.config.request_timeout)
    body = await state.read(request, deadline, CountBody.read)
    served = state.named(body.model)
    served.check_turns(len(body.messages))
    with naming(body.names), state.under_way(served, 1, deadline, caller=request["caller"]):

        def resolve() -> tuple[ChatBody, dict[str, Any], list[str]]:
            chat = body.chat()
            return chat, *template_settings(chat, chat.offer(served.calls, told=served.told), served)

        chat, variables, unsupported = await state.run_by_size(request, deadline, resolve)
        unsupported = [body.names.get(name, name) for name in unsupported]
        request["headers"] |= state.ignored.headers([*unsupported, *body.ignored])
        async with deadline.held():
            await served.ready()
            ids, _ = await served.encode_chat(chat.messages, variables, request["turn"], answer=True)
    return web.json_response({"input_tokens": len(ids)})
