"""A chat's messages: asked, answered, undone, saved and loaded. Independent of engine and terminal."""

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from specdec.errors import RequestError
from specdec.models.folder import short

Message = Mapping[str, Any]
LARGEST_BYTES = 64 << 20
"""Maximum size of a loaded file."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The system prompt and the messages after it.

    Immutable: each change makes a new one, so that a failed turn leaves no trace.
    """

    system: str | None = None
    turns: tuple[Message, ...] = ()

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Self:
        """Split the system prompt off a list of messages."""
        if messages and messages[0]["role"] == "system":
            return cls(messages[0]["content"], tuple(messages[1:]))
        return cls(None, tuple(messages))

    @property
    def messages(self) -> list[Message]:
        """Return all messages, the system prompt first."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    @property
    def question(self) -> str:
        """Return the last user message's text; empty without one."""
        return next((str(turn["content"]) for turn in reversed(self.turns) if turn["role"] == "user"), "")

    def asking(self, text: str) -> Self:
        """Add a user message."""
        return replace(self, turns=(*self.turns, {"role": "user", "content": text}))

    def answered(self, message: Message) -> Self:
        """Add the model's answer."""
        return replace(self, turns=(*self.turns, message))

    def unanswered(self) -> Self | None:
        """Return the conversation up to the last user message; None without one."""
        last = next((i for i, turn in reversed([*enumerate(self.turns)]) if turn["role"] == "user"), None)
        return None if last is None else replace(self, turns=self.turns[: last + 1])

    def undone(self) -> Self | None:
        """Return the conversation before the last user message; None without one."""
        question = self.unanswered()
        return question and replace(question, turns=question.turns[:-1])


def joined(messages: Sequence[Message]) -> str:
    """Join texts for a completion model: an answer continues its question directly."""
    text = ""
    for message in messages:
        if message["role"] != "assistant" and text:
            # The model's text stays unchanged, or its cached prefix would be lost.
            text += "" if text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
        text += str(message["content"])
    return text


def check_text(text: str, field: str) -> str:
    """Refuse text that cannot be encoded: a command's arguments may contain any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{field}: it is not valid Unicode; give text in UTF-8.", field=field) from None
    return text


def save_messages(path: Path, messages: Sequence[Message], *, replaces: bool) -> None:
    """Write messages as JSON; an existing file is kept unless `replaces`."""
    text = json.dumps(messages, ensure_ascii=False, indent=1) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if replaces else os.O_EXCL)
    try:
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RequestError(
            f"/save: {short(path)} exists and is not this chat's; choose another name.", field="file"
        ) from None
    except (OSError, ValueError) as error:
        raise RequestError(f"/save: {short(path)} cannot be written: {_why(error)}.", field="file") from None


def load_messages(path: Path) -> Conversation:
    """Load the output of `save_messages`, or an object with `messages` as in OpenAI's API."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_BYTES:
            raise ValueError(f"it is no file of at most {LARGEST_BYTES >> 20} MiB")
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            f"/load: {short(path)} cannot be read as JSON: {_why(error)}.", field="file"
        ) from None
    messages = data.get("messages") if isinstance(data, dict) else data
    if not isinstance(messages, list) or not messages:
        raise _unreadable(
            path, 'holds no messages; it must be a list such as [{"role": "user", "content": "…"}]'
        )
    return Conversation.of([_message(item, i, path) for i, item in enumerate(messages)])


def _message(value: Any, index: int, path: Path) -> Message:
    """Check one message and join its parts; other fields are left to the template."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise _unreadable(path, f"messages.{index} has no role")
    content = value.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(text for text in texts if isinstance(text, str))
        if not all(isinstance(text, str) for text in texts):
            raise _unreadable(
                path, f"messages.{index}.content has a part without text; a chat takes text only"
            )
    if content is not None and not isinstance(content, str):
        raise _unreadable(path, f"messages.{index}.content is not text")
    check_text(json.dumps(value, ensure_ascii=False), f"messages.{index}")
    return {**value, "content": content or ""}


def _unreadable(path: Path, reason: str) -> RequestError:
    return RequestError(f"/load: {short(path)}: {reason}.", field="file")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
