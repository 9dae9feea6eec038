"""Responses of completions and chats, whole or in chunks."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.core.outputs import Delta
from specdec.core.params import PreparedPrompt
from specdec.server.bodies import RequestBody
from specdec.server.failures import Failure
from specdec.server.formats import AnswerFormat, Usage, written

Json = dict[str, Any]


class Chunks:
    """The response to one request."""

    is_typed = False

    def __init__(
        self, form: AnswerFormat, body: RequestBody, model: str, prepared: Sequence[PreparedPrompt]
    ) -> None:
        self.usage = Usage.of(prepared)
        self._form, self._body, self._prepared = form, body, prepared
        self._opened: set[int] = set()
        self._extra_fields: Json = {}
        self._head = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",
            "object": form.chunk,
            "created": int(time.time()),
            "model": model,
        }

    def add_fields(self, fields: Json) -> None:
        """Add fields next to the choices of the last chunk or the whole response."""
        self._extra_fields |= fields

    def whole(self, outputs: Mapping[int, Delta]) -> Iterator[str]:
        """Yield the response's JSON choice by choice: encoding blocks all other requests."""
        head = json.dumps({**self._head, "object": self._form.whole})
        yield f'{head[:-1]}, "choices": ['
        for position, choice in enumerate(sorted(outputs)):
            yield ", " if position else ""
            yield from written(self._form.said(choice, outputs[choice]) | self._prompt_of(choice))
        extra = {"metrics": self.usage.metrics()} if self._body.return_metrics else {}
        tail = json.dumps({"usage": self.usage.as_json()} | extra | self._extra_fields)
        yield f"], {tail[1:]}"

    def events(self, choice: int, delta: Delta) -> list[Json]:
        choices = self._form.parts(choice, delta)
        if choice not in self._opened:
            self._opened.add(choice)
            opening = self._form.first(choice)
            choices = [opening, *choices] if opening else choices
            choices[:1] = [entry | self._prompt_of(choice) for entry in choices[:1]]
        return [self._with_usage({**self._head, "choices": [entry]}) for entry in choices]

    def end(self) -> list[Json]:
        body, last = self._body, {**self._head, "choices": []}
        if not body.includes_usage and not body.return_metrics and not self._extra_fields:
            return []
        last |= {"usage": self.usage.as_json()} if body.includes_usage else {}
        last |= {"metrics": self.usage.metrics()} if body.return_metrics else {}
        return [last | self._extra_fields]

    def failed(self, failure: Failure) -> list[Json]:
        return [failure.body]

    def _prompt_of(self, choice: int) -> Json:
        """Return a choice's prompt token ids, if token ids are requested."""
        shown, n = self._form.shown, self._prepared[0].params.n
        return {"prompt_token_ids": list(self._prepared[choice // n].ids)} if shown.token_ids else {}

    def _with_usage(self, chunk: Json) -> Json:
        if self._body.counts_on:
            return chunk | {"usage": self.usage.as_json()}
        return chunk | {"usage": None} if self._body.includes_usage else chunk
