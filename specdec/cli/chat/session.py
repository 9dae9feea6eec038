"""One chat with an engine: the conversation's prompt, its answer and their settings."""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from specdec.cli.chat.conversation import Conversation, Message, joined
from specdec.config.sampling import SamplingParams
from specdec.core.outputs import Delta
from specdec.core.params import PreparedPrompt
from specdec.engine.engine import SpecEngine
from specdec.errors import RequestError, SpecdecError
from specdec.text.answers.events import ThinkingDelta
from specdec.text.answers.reader import AnswerReader
from specdec.text.answers.thinking import ThinkingFormat, thinking_format
from specdec.text.chat_template import LONGEST_ANSWER, THINKING_SWITCHES, load_template
from specdec.text.generation_config import longest_answer, sampling_defaults
from specdec.text.tokenizer import TextPiece

LONGEST_COMPLETION = 256
"""Default max_tokens of a completion model: few texts end."""


class AnswerPart(NamedTuple):
    """A part of an answer from one token."""

    text: str
    is_thinking: bool
    is_drafted: bool
    """Whether the token was an accepted draft."""


class ChatPrompt(NamedTuple):
    """A conversation that ends with a question, tokenized for the engine."""

    prepared: PreparedPrompt
    thinking: ThinkingFormat | None
    """The format of its thinking; None if it does not think."""


class ChatSession:
    """Hold the conversation, the sampling parameters and the template's variables; commands change them."""

    def __init__(
        self,
        engine: SpecEngine,
        folder: Path,
        params: SamplingParams,
        *,
        is_completion: bool = False,
        is_talk: bool = True,
    ) -> None:
        if engine.tokenizer is None:
            raise RequestError(
                "chat: the model's folder has no tokenizer.json; without one it takes "
                "token ids only, with specdec generate --prompt-ids.",
                field="prompt",
            )
        self.engine, self._tokenizer = engine, engine.tokenizer
        self.params = params.with_defaults(sampling_defaults(folder))
        self.template = load_template(folder)
        self.is_talk = is_talk
        """Whether messages and commands may follow the first message."""
        self.completes = is_completion or self.template.is_plain
        """Whether the model continues the joined texts, as it was not trained on chats."""
        self.thinking = None if self.completes else thinking_format("auto", self.template)
        """The model's thinking format, if any."""
        self.default_max_tokens = (
            LONGEST_COMPLETION if self.completes else longest_answer(folder) or LONGEST_ANSWER
        )
        self.variables: dict[str, Any] = {}
        """Variables for the chat template."""
        self.thinks: bool | None = None
        """The template's thinking switch; None: not set."""
        self.conversation = Conversation()
        self.shows_drafts = False
        self.file: Path | None = None
        """The last saved or loaded file."""

    @property
    def max_model_len(self) -> int:
        return self.engine.model.settings.max_model_len

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """Render messages for the model, up to the start of the answer."""
        if self.completes:
            return joined(messages)
        return self.template.render(messages, self.variables, answer=answer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a rendered chat."""
        self.engine.check_length(text)
        return self._tokenizer.encode(text, special=self.completes)

    def use_system(self, text: str | None) -> None:
        """Change the system prompt; keep the old one if the template refuses it."""
        conversation = replace(self.conversation, system=text)
        self.encode(self.render(Conversation(system=text).asking("?").messages))
        self.conversation = conversation

    def use_thinking(self, on: bool) -> None:
        """Switch thinking on or off, if the template supports it."""
        switches = [name for name in THINKING_SWITCHES if self.template.takes(name) and not self.completes]
        if not switches:
            raise RequestError("think: the model's chat template has no switch for thinking.", field="think")
        self.variables |= dict.fromkeys(switches, on)
        self.thinks = on

    def prepare(self, question: Conversation) -> ChatPrompt:
        """Turn a conversation that ends with a question into a prompt; raise if it cannot be served."""
        text = self.render(question.messages)
        ids = self.encode(text)
        # A template may render the last answer differently from the model's output, such as without its
        # reasoning: the next prompt then diverges from this one after the question, and needs a cached state
        # there. A retry matches up to the last token, which is prefilled again.
        mark = min(_common(ids, self.encode(self.render(question.messages, answer=False))), len(ids) - 1)
        updates: dict[str, Any] = {"cache_marks": [mark] if mark else None}
        if "max_tokens" not in self.params.model_fields_set:
            available = self.max_model_len - len(ids)
            updates["max_tokens"] = max(min(self.default_max_tokens, available), self.params.min_tokens, 1)
        prepared = self.engine.prepare(ids, self.params.model_copy(update=updates))
        return ChatPrompt(prepared, self.thinking.after(text) if self.thinking else None)

    def begin(self, question: Conversation) -> "StreamingAnswer":
        """Start the answer to a conversation that ends with a question."""
        return StreamingAnswer(self.engine, self.prepare(question))

    def commit(self, question: Conversation, answer: "StreamingAnswer") -> bool:
        """Add a question and its answer so far to the conversation; return whether there was an answer."""
        if not (answer.said or answer.thought or answer.is_whole):
            return False
        self.conversation = question.answered(answer.message)
        return True

    def explain_end(self, answer: "StreamingAnswer") -> str | None:
        """Explain why an answer ended, unless the model ended it, and the remedy.

        The remedy is a command, or an option if nothing else can be typed, as after `--message`.
        """
        last = answer.last
        if last is None or last.stats is None or last.finish_reason != "length":
            return None if answer.said or answer.thought else "The answer is empty."
        length = last.stats.prompt_tokens + last.stats.output_tokens
        if length >= self.max_model_len:
            return f"The context is full ({length:,} tokens): {self.make_room}."
        remedy = "/set max_tokens" if self.is_talk else "--max-tokens"
        return f"Cut at {last.stats.output_tokens:,} tokens: {remedy} allows more."

    @property
    def make_room(self) -> str:
        """Explain how to shorten a chat or lengthen the context."""
        supported = self.engine.model.network.spec.max_length
        longer = f"; --max-model-len takes up to {supported:,}" if supported > self.max_model_len else ""
        return f"{'/undo or /clear' if self.is_talk else 'a shorter message'} makes room{longer}"


class StreamingAnswer:
    """An answer being generated. Leaving the context cancels the request."""

    def __init__(self, engine: SpecEngine, prompt: ChatPrompt) -> None:
        self._inbox: queue.SimpleQueue[Delta | SpecdecError] = queue.SimpleQueue()
        self._ticket = engine.submit([prompt.prepared], lambda _, item: self._inbox.put(item))
        self._reader = AnswerReader(prompt.thinking)
        self.said = self.thought = ""
        self.last: Delta | None = None

    @property
    def message(self) -> Message:
        """Return the text so far as a message for chat templates."""
        reasoning = {"reasoning_content": self.thought} if self.thought else {}
        return {"role": "assistant", "content": self.said, **reasoning}

    @property
    def is_whole(self) -> bool:
        """Whether it ended without being cancelled."""
        return self.last is not None and self.last.finish_reason in ("stop", "length")

    def cancel(self) -> None:
        """Cancel it between two steps; its last delta follows. A signal handler may call this."""
        self._ticket.cancel()

    def __iter__(self) -> Iterator[list[AnswerPart]]:
        """Yield the parts that each step adds."""
        while self.last is None or self.last.finish_reason is None:
            delta = self._inbox.get()
            if isinstance(delta, SpecdecError):
                raise delta
            self.last = delta
            yield self._read(delta)

    def _read(self, delta: Delta) -> list[AnswerPart]:
        """Parse a delta by token: held-back text gets the origin of the token that releases it."""
        parts = [part for piece in delta.pieces for part in self._parts(piece)]
        if delta.finish_reason:
            parts += self._parts(TextPiece("", 0), cut=delta.finish_reason != "stop")
        for part in parts:
            if part.is_thinking:
                self.thought += part.text
            else:
                self.said += part.text
        return parts

    def _parts(self, piece: TextPiece, *, cut: bool | None = None) -> list[AnswerPart]:
        """Return the parts that a piece adds; with `cut`, those held back at the answer's end."""
        events = self._reader.push(piece.text) if cut is None else self._reader.finish(cut=cut)
        return [AnswerPart(event[0], isinstance(event, ThinkingDelta), piece.origin > 0) for event in events]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of two prompts' common prefix."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
