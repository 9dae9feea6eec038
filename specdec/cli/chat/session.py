"""One chat with an engine: the prompt that a conversation makes, its answer, and what it is written with."""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specdec.cli.chat.conversation import Conversation, Message, joined
from specdec.config.sampling import SamplingParams
from specdec.core.outputs import Delta
from specdec.core.terms import Prepared
from specdec.engine.engine import SpecEngine
from specdec.errors import RequestError, SpecdecError
from specdec.text.chat_template import load_template, longest_answer

LONGEST_ANSWER = 4096
"""Default max_tokens of a chat: some models never end on their own."""
LONGEST_COMPLETION = 256
"""That of a model that only completes: few texts end."""


class Chat:
    """Holds the conversation, the sampling parameters and the template's variables; commands change them."""

    def __init__(
        self, engine: SpecEngine, folder: Path, params: SamplingParams, *, is_completion: bool = False
    ) -> None:
        if engine.tokenizer is None:
            raise RequestError(
                "chat: the model's folder has no tokenizer.json; without one it reads token ids alone, with "
                "specdec generate --prompt-ids.",
                field="prompt",
            )
        self.engine, self.params, self._tokenizer = engine, params, engine.tokenizer
        self.template = load_template(folder)
        self.completes = is_completion or self.template.is_plain
        """Whether the model goes on with the joined texts: it was not trained on chats."""
        self.default_max_tokens = (
            LONGEST_COMPLETION if self.completes else longest_answer(folder) or LONGEST_ANSWER
        )
        self.variables: dict[str, Any] = {}
        """The chat template's."""
        self.conversation = Conversation()
        self.shows_drafts = False
        self.file: Path | None = None
        """What was saved or loaded last."""

    @property
    def max_model_len(self) -> int:
        return self.engine.model.settings.max_model_len

    def encode(self, messages: Sequence[Message], *, answer: bool = True) -> list[int]:
        """Return the prompt of these messages, up to where the answer begins."""
        text = (
            joined(messages)
            if self.completes
            else self.template.render(messages, self.variables, answer=answer)
        )
        self.engine.check_length(text)
        return self._tokenizer.encode(text, special=self.completes)

    def use_system(self, text: str | None) -> None:
        """Change the system prompt; one that the template refuses leaves the one before."""
        changed = replace(self.conversation, system=text)
        self.encode(Conversation(system=text).asking("?").messages)
        self.conversation = changed

    def prepare(self, asked: Conversation) -> Prepared:
        """Turn a conversation that ends with a question into a prompt, and refuse what cannot be served."""
        ids = self.encode(asked.messages)
        # A template may write the last answer otherwise than the model did, its reasoning left out: then the
        # next prompt parts from this one behind the question, and needs a state that is kept there.
        mark = _common(ids, self.encode(asked.messages, answer=False))
        own: dict[str, Any] = {"cache_marks": [mark] if mark else None}
        if "max_tokens" not in self.params.model_fields_set:
            room = self.max_model_len - len(ids)
            own["max_tokens"] = max(min(self.default_max_tokens, room), self.params.min_tokens, 1)
        return self.engine.prepare(ids, self.params.model_copy(update=own))

    def begin(self, asked: Conversation) -> "Answer":
        """Begin the answer to a conversation that ends with a question."""
        return Answer(self.engine, self.prepare(asked))

    def commit(self, asked: Conversation, answer: "Answer") -> bool:
        """Put a question and what was written of its answer into the conversation; tell if there was any."""
        if not (answer.text or answer.is_whole):
            return False
        self.conversation = asked.answered({"role": "assistant", "content": answer.text})
        return True

    def remark(self, answer: "Answer") -> str | None:
        """Say why an answer ended, unless the model ended it, and what to do about it."""
        last = answer.last
        if last is None or last.stats is None or last.finish_reason != "length":
            return None if answer.text else "The answer is empty."
        length = last.stats.prompt_tokens + last.stats.output_tokens
        if length >= self.max_model_len:
            return f"The context is full ({length:,} tokens): {self.make_room}."
        return f"Cut at {last.stats.output_tokens:,} tokens: /set max_tokens allows more."

    @property
    def make_room(self) -> str:
        """Say how a chat gets shorter, or the context longer."""
        most = self.engine.model.network.spec.max_length
        longer = f"; --max-model-len takes up to {most:,}" if most > self.max_model_len else ""
        return f"/undo or /clear makes room{longer}"


class Answer:
    """An answer while it is written. Leaving it cancels the request."""

    def __init__(self, engine: SpecEngine, prepared: Prepared) -> None:
        self._inbox: queue.SimpleQueue[Delta | SpecdecError] = queue.SimpleQueue()
        self._ticket = engine.submit([prepared], lambda _, said: self._inbox.put(said))
        self.text = ""
        self.last: Delta | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end, and was not cancelled."""
        return self.last is not None and self.last.finish_reason in ("stop", "length")

    def cancel(self) -> None:
        """End it between two steps; its last delta comes then. A signal handler may call this."""
        self._ticket.cancel()

    def __iter__(self) -> Iterator[Delta]:
        while self.last is None or self.last.finish_reason is None:
            said = self._inbox.get()
            if isinstance(said, SpecdecError):
                raise said
            self.text, self.last = self.text + said.text, said
            yield said

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two prompts have in common from their beginning."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
