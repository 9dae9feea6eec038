"""Benchmark prompts: the sets that ship with the package, and files in common formats."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError

CATEGORIES = ("code", "edit", "prose", "mixed")
"""The shipped sets: code completion, repetitive editing, licences, and a mix with documentation."""

FIELDS = (
    "prompt",
    "prompt_token_ids",
    "messages",
    "turns",
    "conversations",
    "conversation",
    "text",
    "question",
)
"""Fields that may hold a line's prompt: the first present is used, and the type of its value decides the
rest."""
NAMES = ("name", "question_id", "task_id", "custom_id", "id")
ROLES = {"human": "user", "user": "user", "system": "system"}
"""Roles before a model's first answer, in OpenAI's and ShareGPT's names."""

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A text to continue, or the start of a chat: the system's messages and the first user turn."""

    category: str
    name: str
    text: str | None
    """The text to continue; for a chat, the first user turn. None: the prompt is token ids."""
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] = ()
    """A chat's messages up to the first answer, for a chat template; empty if this is not a chat."""


class NotAPromptError(Exception):
    """A line of a file is not a prompt."""


def choose(path: Path | None, categories: Sequence[str] = (), limit: int | None = None) -> list[BenchPrompt]:
    """Return a file's prompts, or the shipped ones: of the named categories, the first `limit` of each."""
    prompts = read_prompts(path) if path else bundled()
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    if unknown := [name for name in categories if name not in known]:
        raise ConfigError(
            f"--category: {unknown[0]!r} is none that {path or 'the package'} has: {', '.join(known)}",
            field="category",
        )
    groups = {name: [p for p in prompts if p.category == name] for name in categories or known}
    return [prompt for group in groups.values() for prompt in group[:limit]]


def bundled(categories: Sequence[str] = ()) -> list[BenchPrompt]:
    """Return the shipped prompts, from texts that the shipped checkpoint was not trained on."""
    folder = resources.files("specdec") / "assets" / "prompts"
    prompts = []
    for category in categories or CATEGORIES:
        if category not in CATEGORIES:
            raise ConfigError(f"category: {category!r} is none of {', '.join(CATEGORIES)}", field="category")
        name = f"{category}.jsonl"
        prompts += _parse((folder / name).read_text("utf-8"), Path(name))
    return prompts


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Parse a file: `.txt` is one prompt; other files hold one JSON object per line, or a list of them.

    The prompt of a chat with several turns is its first user turn, preceded by the system's message.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise _refused(f"{path} cannot be read ({error.strerror}); name a file of prompts") from error
    except UnicodeDecodeError as error:
        raise _refused(f"{path} is not UTF-8 text from byte {error.start} on; convert it first") from error
    if path.suffix == ".txt":
        prompts = [BenchPrompt(path.stem, path.stem, text)] if text.strip() else []
    else:
        prompts = _parse(text, path)
    if not prompts:
        raise _refused(f"{path} has no prompts; write one JSON object a line, such as {_EXAMPLE}")
    return prompts


_EXAMPLE = '{"prompt": "def fib(n):"}'


def _parse(text: str, path: Path) -> list[BenchPrompt]:
    prompts = []
    for where, value in _objects(text, path):
        try:
            prompts.append(_prompt(value, where, path.stem))
        except NotAPromptError as error:
            raise _refused(f"{path}, {where}: {error}") from None
    return prompts


def _objects(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each object with its position in the file."""
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except ValueError as error:
            raise _refused(f"{path} begins as a JSON list and is none ({error}); mend it") from None
        yield from ((f"item {number}", item) for number, item in enumerate(items, 1))
        return
    # Not splitlines: JSON strings may contain other Unicode line separators.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except ValueError as error:
            expected = f"is no JSON ({error}); expected one object a line, such as {_EXAMPLE}"
            raise _refused(f"{path}, line {number}: {expected}") from None


def _prompt(value: Any, where: str, category: str) -> BenchPrompt:
    if not isinstance(value, dict):
        raise NotAPromptError(f"expected a JSON object such as {_EXAMPLE}, found a {_kind(value)}")
    # OpenAI's batch files nest the request in `body`.
    inner = value["body"] if isinstance(value.get("body"), dict) else value
    field = next((name for name in FIELDS if inner.get(name) is not None), None)
    if field is None:
        raise NotAPromptError(f"expected one of {', '.join(FIELDS)}, found {', '.join(value) or 'nothing'}")
    text, token_ids, messages = _content(inner[field], field)
    if text is not None and not text.strip():
        raise NotAPromptError(f"{field!r} is empty")
    name = next((value[key] for key in NAMES if isinstance(value.get(key), str | int)), where)
    kind = value.get("category")
    return BenchPrompt(kind if isinstance(kind, str) else category, str(name), text, token_ids, messages)


def _content(value: Any, field: str) -> tuple[str | None, tuple[int, ...] | None, tuple[Message, ...]]:
    """Parse a field by its type: a text, token ids, user turns, or messages."""
    match value:
        case str():
            return value, None, ()
        case [int(), *_] if all(type(token) is int and token >= 0 for token in value):
            return None, tuple(value), ()
        case [str(first), *_]:
            return first, None, ({"role": "user", "content": first},)
        case [dict(), *_]:
            messages = _opening(value, field)
            return messages[-1]["content"], None, messages
    raise NotAPromptError(
        f"{field!r} must be a string, a list of token ids from 0 on, a list of turns, or a list of messages; "
        f"found a {_kind(value)}"
    )


def _opening(messages: Sequence[Any], field: str) -> tuple[Message, ...]:
    """Return the system's messages and the first user turn; later turns depend on a model's answers."""
    kept: list[Message] = []
    for message in messages:
        if not isinstance(message, dict):
            raise NotAPromptError(f"{field!r} has a message that is no object, but a {_kind(message)}")
        role = ROLES.get(str(message.get("role", message.get("from"))))
        if role is not None:
            content = _plain(message.get("content", message.get("value")), field)
            kept.append({"role": role, "content": content})
        if role == "user":
            return tuple(kept)
    raise NotAPromptError(f"{field!r} has no message of a user: expected {{'role': 'user', 'content': …}}")


def _plain(content: Any, field: str) -> str:
    """Return a message's text, joining parts."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(texts):
        raise NotAPromptError(f"{field!r} has a message whose content is not text; only text can be a prompt")
    return "".join(known)


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", int: "number", float: "number", bool: "truth value"}
    return names.get(type(value), "null")


def _refused(message: str) -> ConfigError:
    return ConfigError(f"--prompts: {message}", field="prompts")
