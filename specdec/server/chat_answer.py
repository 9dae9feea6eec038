"""One choice of a chat in OpenAI's format."""

import uuid
from typing import Any

from specdec.core.outputs import Delta
from specdec.server.events import AnswerEvents, ExpectedContent
from specdec.server.messages import THOUGHT
from specdec.text.answers.events import ArgumentsDelta, Event, TextDelta, ThinkingDelta

Json = dict[str, Any]


class ChatAnswer:
    def __init__(self, expected: ExpectedContent) -> None:
        self._events = AnswerEvents(expected)
        self.finish_reason = self._events.finish_reason
        self._index = -1
        """Index of the current call."""

    def parts(self, delta: Delta) -> list[Json]:
        """Return the message parts of a delta, in order."""
        return [self._part(event) for event in self._events.push(delta)]

    def message(self, delta: Delta) -> Json:
        """Return a whole message."""
        texts, calls = dict.fromkeys(("content", *THOUGHT), ""), list[Json]()
        for part in self.parts(delta):
            for name in texts:
                texts[name] += part.get(name, "")
            for call in part.get("tool_calls", ()):
                if "id" in call:
                    calls.append({name: call[name] for name in ("id", "type", "function")})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        reasoning = {name: texts[name] for name in THOUGHT if texts[name]}
        is_silent = not texts["content"] and (calls or self._events.has_thought)
        content = None if is_silent else texts["content"]
        message: Json = {"role": "assistant", "content": content, **reasoning}
        return message | ({"tool_calls": calls} if calls else {})

    def _part(self, event: Event) -> Json:
        if isinstance(event, ThinkingDelta):
            return dict.fromkeys(THOUGHT, event.text)
        if isinstance(event, TextDelta):
            return {"content": event.text}
        if isinstance(event, ArgumentsDelta):
            return {"tool_calls": [{"index": self._index, "function": {"arguments": event.text}}]}
        self._index += 1
        header = {"index": self._index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        return {"tool_calls": [header | {"function": {"name": event.name, "arguments": ""}}]}
