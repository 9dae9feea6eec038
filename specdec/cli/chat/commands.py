"""The table of chat commands: names, arguments, help and actions."""

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specdec.cli.chat.conversation import Conversation, load_messages, save_messages
from specdec.cli.chat.options import NOT_IN_CHATS
from specdec.cli.chat.session import ChatSession
from specdec.cli.text import binary
from specdec.config.options import SWITCH, TEXTS, read_value
from specdec.config.parser import as_written
from specdec.config.sampling import MOST_TOKENS, SamplingParams
from specdec.errors import ConfigError, RequestError

SETTINGS = [name for name in SamplingParams.model_fields if name not in NOT_IN_CHATS]
LISTS_OF_TEXTS = ("stop", "bad_words")
DEFAULT = ("none", "default")
"""Values of max_tokens that restore the default."""
COMMAND = re.compile(r"/(\w+|\?)(?:\s+(.*))?", re.DOTALL)
"""A word after the slash, and its argument: `/usr/bin` and `/* comment */` are messages."""


@dataclass(frozen=True, slots=True)
class CommandReply:
    """The result of a command."""

    says: str = ""
    rows: Sequence[tuple[str, str]] = ()
    """A table of names and descriptions to show."""
    asks: Conversation | None = None
    """The conversation to answer next."""
    edit: str = ""
    """Text to edit at the next prompt."""
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    takes: str
    says: str
    run: Callable[[ChatSession, str], CommandReply]
    aliases: tuple[str, ...] = ()


def run_command(chat: ChatSession, line: str) -> CommandReply | None:
    """Run a command; return None if the line is a message."""
    match = COMMAND.fullmatch(line.strip()) if line.startswith("/") else None
    if match is None:
        return None
    names = {alias: name for name, entry in COMMANDS.items() for alias in (name, *entry.aliases)}
    name = f"/{match[1]}"
    if name not in names:
        similar = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {similar[0]}?" if similar else "/help lists them."
        raise RequestError(
            f"There is no command {name}; {hint} To send it as a message, put a space before it.",
            field="command",
        )
    command, argument = COMMANDS[names[name]], (match[2] or "").strip()
    if argument and not command.takes:
        raise RequestError(f"{name} takes no argument; {argument!r:.40} was given.", field="command")
    return command.run(chat, argument)


def _help(chat: ChatSession, argument: str) -> CommandReply:
    names = {name: ", ".join((name, *entry.aliases)) for name, entry in COMMANDS.items()}
    rows = [(f"{names[name]} {entry.takes}".strip(), entry.says) for name, entry in COMMANDS.items()]
    return CommandReply(NOTE, rows)


def _system(chat: ChatSession, text: str) -> CommandReply:
    if text:
        chat.use_system(None if text.lower() == "none" else text)
    prompt = chat.conversation.system
    return CommandReply("There is no system prompt." if prompt is None else f"System prompt: {prompt}")


def _set(chat: ChatSession, argument: str) -> CommandReply:
    name, _, text = argument.partition(" ")
    name = name.replace("-", "_")
    if not name:
        return CommandReply(rows=[(setting, _value(chat, setting)) for setting in SETTINGS])
    if name not in SETTINGS:
        similar = difflib.get_close_matches(name, SETTINGS, 1)
        hint = f"did you mean {similar[0]}?" if similar else f"known are {', '.join(SETTINGS)}."
        raise RequestError(f"/set: {name} is not a setting of a chat; {hint}", field=name)
    field, text = SamplingParams.model_fields[name], text.strip()
    if not text:
        syntax = f"; it is written as {TEXTS}" if name in LISTS_OF_TEXTS else ""
        return CommandReply(f"{name} {_value(chat, name)}: {field.title}; {field.description}{syntax}")
    params = chat.params.model_dump(exclude_unset=True)
    try:
        if name == "max_tokens" and text.lower() in DEFAULT:
            params.pop(name, None)
        else:
            params[name] = read_value(field, text)
        chat.params = SamplingParams.model_validate(params)
    except ConfigError as error:
        if error.field == "max_tokens":
            expected = f"an integer from 1 to {MOST_TOKENS}, or none for the default"
            raise ConfigError(f"max_tokens cannot be {text:.40}; give {expected}.", field=name) from None
        raise ConfigError(as_written(str(error), {name: name}), field=error.field) from None
    return CommandReply(f"{name} {_value(chat, name)}")


def _value(chat: ChatSession, name: str) -> str:
    if name == "max_tokens" and name not in chat.params.model_fields_set:
        return f"{chat.default_max_tokens}, or what the context holds"
    match getattr(chat.params, name):
        case None:
            return "none"
        case bool(value):
            return "on" if value else "off"
        case str() | list() as value:
            return json.dumps(value, ensure_ascii=False)
        case value:
            return str(value)


def _clear(chat: ChatSession, argument: str) -> CommandReply:
    chat.conversation = replace(chat.conversation, turns=())
    note = "" if chat.conversation.system is None else " The system prompt stays."
    return CommandReply(f"The conversation was cleared.{note}")


def _retry(chat: ChatSession, argument: str) -> CommandReply:
    return CommandReply(asks=_last(chat.conversation.unanswered(), "/retry"))


def _undo(chat: ChatSession, argument: str) -> CommandReply:
    text = chat.conversation.question
    chat.conversation = _last(chat.conversation.undone(), "/undo")
    return CommandReply("Removed the last message and its answer from the conversation.", edit=text)


def _last(conversation: Conversation | None, name: str) -> Conversation:
    if conversation is None:
        raise RequestError(f"{name}: there is no message yet.", field="command")
    return conversation


def _save(chat: ChatSession, argument: str) -> CommandReply:
    path, messages = _path(argument, "/save"), chat.conversation.messages
    save_messages(path, messages, replaces=path == chat.file)
    chat.file = path
    return CommandReply(f"{len(messages)} messages saved in {path}.")


def _load(chat: ChatSession, argument: str) -> CommandReply:
    path = _path(argument, "/load")
    loaded = load_messages(path)
    chat.encode(chat.render(loaded.messages))  # a refusal by the template changes nothing
    chat.conversation, chat.file = loaded, path
    return CommandReply(f"{len(loaded.messages)} messages loaded from {path}.")


def _path(argument: str, name: str) -> Path:
    if not argument:
        raise RequestError(f"{name}: name a file, as in {name} chat.json.", field="file")
    return Path(argument).expanduser()


def _drafts(chat: ChatSession, argument: str) -> CommandReply:
    if argument:
        chat.shows_drafts = _switch(argument, "/drafts")
    return CommandReply(
        "Tokens accepted from a draft are shown in colour."
        if chat.shows_drafts
        else "Drafts are not shown; the text is the same with them and without."
    )


def _think(chat: ChatSession, argument: str) -> CommandReply:
    if argument:
        chat.use_thinking(_switch(argument, "/think"))
    if chat.thinks is None:
        return CommandReply("The chat template decides whether the model thinks before it answers.")
    return CommandReply(f"Thinking before an answer is {'on' if chat.thinks else 'off'}.")


def _switch(argument: str, name: str) -> bool:
    if argument.lower() not in SWITCH:
        raise RequestError(f"{name}: give on or off, not {argument!r:.40}.", field="command")
    return SWITCH[argument.lower()]


def _stats(chat: ChatSession, argument: str) -> CommandReply:
    stats, settings = chat.engine.stats(), chat.engine.model.settings
    messages = chat.conversation.messages
    length = len(chat.encode(chat.render(messages, answer=False))) if messages else 0
    rows = {"context": f"{length:,} of {chat.max_model_len:,} tokens in {len(messages)} messages"}
    rows["generated"] = f"{stats.tokens:,} tokens in {stats.steps:,} verify steps"
    if settings.drafters:
        depths = " ".join(f"{share:.0%}" for share in stats.per_depth)
        rows["drafters"] = ", ".join(settings.drafters)
        rows["accepted"] = (
            f"{stats.accepted:,} of {stats.drafted:,} draft tokens, acceptance length "
            f"{stats.acceptance_length:.2f}, by depth {depths or '-'}"
        )
        if stats.speculation:
            rows["now"] = stats.speculation.reason
    if prefixes := stats.prefixes:
        rows["prefixes"] = f"{prefixes.hit:,} of {prefixes.asked:,} prompt tokens were cached"
        rows["cached"] = binary(prefixes.cached_bytes)
    else:
        rows["prefixes"] = "off (--no-prefix-cache): every turn prefills the whole chat"
    return CommandReply(rows=[*rows.items()])


def _quit(chat: ChatSession, argument: str) -> CommandReply:
    return CommandReply(ends=True)


COMMANDS: Mapping[str, Command] = {
    "/system": Command("[TEXT]", "show or change the system prompt; none removes it", _system),
    "/set": Command("[NAME [VALUE]]", "list or change sampling parameters", _set),
    "/clear": Command("", "start a new conversation", _clear, ("/new",)),
    "/retry": Command("", "answer the last message again", _retry),
    "/undo": Command("", "remove the last message and edit it", _undo),
    "/save": Command("FILE", "write the messages as JSON", _save),
    "/load": Command("FILE", "read the messages from such a file", _load),
    "/think": Command("[on|off]", "show or switch thinking, if the chat template supports it", _think),
    "/drafts": Command("[on|off]", "show or switch colours for accepted draft tokens", _drafts),
    "/stats": Command("", "context, acceptance and prefix cache so far", _stats),
    "/help": Command("", "this list", _help, ("/?",)),
    "/bye": Command("", "exit, as Ctrl-D does", _quit, ("/exit", "/quit")),
}
NOTE = (
    '""" begins and ends a message of several lines; a backslash at the end of a line continues it. '
    "Ctrl-C stops an answer, not the chat."
)
