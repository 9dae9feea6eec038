"""A chat's answer with tool calls, in the form of OpenAI's API."""

import uuid
from typing import Any

from specdec.core.outputs import Delta
from specdec.server.tools.offer import Offer
from specdec.server.tools.source import Arguments, Begin, Event, Text

Json = dict[str, Any]


class CallingAnswer:
    """One choice of a chat with tools. Where one call is allowed, those after the first are left out.

    An answer that must be calls has no text: what is none in it is the beginning of a tag that was cut off.
    """

    def __init__(self, offer: Offer) -> None:
        self._parser, self._parallel = offer.parser(), offer.parallel
        self._speaks = offer.structure is None
        self._calls = 0

    def parts(self, delta: Delta) -> list[Json]:
        """Return what a piece of the answer adds, in order."""
        events = self._parser.push(delta.text)
        if delta.finish_reason:
            events += self._parser.finish(cut=delta.finish_reason != "stop")
        return [part for event in events if (part := self._part(event))]

    def message(self, delta: Delta) -> Json:
        """Return a whole answer."""
        text, calls = "", list[Json]()
        for part in self.parts(delta):
            text += part.get("content", "")
            for call in part.get("tool_calls", ()):
                if "id" in call:
                    calls.append({name: call[name] for name in ("id", "type", "function")})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        message: Json = {"role": "assistant", "content": text if text or not calls else None}
        return message | ({"tool_calls": calls} if calls else {})

    def reason(self, why: str | None) -> str | None:
        """Return the finish reason: tool_calls if it holds any and was not cut off."""
        return "tool_calls" if why == "stop" and self._calls else why

    def _part(self, event: Event) -> Json | None:
        self._calls += isinstance(event, Begin)
        if isinstance(event, Text):
            return {"content": event.text} if self._speaks else None
        if self._calls > 1 and not self._parallel:
            return None
        index = self._calls - 1
        if isinstance(event, Arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": event.text}}]}
        begun = {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        return {"tool_calls": [begun | {"function": {"name": event.name, "arguments": ""}}]}
