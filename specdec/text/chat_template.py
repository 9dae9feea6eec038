"""Chat templates: a checkpoint's own, rendered in a sandbox."""

import datetime
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.config.folders import has_file
from specdec.config.template import SPECIAL
from specdec.errors import CheckpointError, RequestError

log = logging.getLogger(__name__)

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch thinking: Qwen's and Nemotron's, and DeepSeek's."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's API; a template may have others, such as `ipython`."""
LONGEST_ANSWER = 4096
"""Default max_tokens of a chat: some models never stop on their own."""
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
"""Errors that a template raises for messages it does not support."""

Message = Mapping[str, Any]


class _Generation(Extension):
    """Render the content of `{% generation %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Render messages as the checkpoint's tokenizer does; without a template, join their texts."""

    def __init__(
        self, source: str | None, special: Mapping[str, str], *, where: Path, tool_use: str | None = None
    ) -> None:
        self.is_plain = source is None
        self.source = tool_use or source or ""
        """The template for chats with tools; some checkpoints have a separate one."""
        self._special, self._where = special, where
        self._sources = "".join({source or "", self.source})
        environment = _environment()
        try:
            self._template, self._tool_use = map(environment.from_string, (source or "", self.source))
            self._variables = {
                name
                for template in {source or "", self.source}
                for name in find_undeclared_variables(environment.parse(template))
            }
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:  # Jinja compiles to Python
            raise CheckpointError(
                f"{where} has a chat template that does not parse ({error}); fix or remove it",
                field="chat_template",
            ) from error

    def takes(self, variable: str) -> bool:
        """Return whether the template uses a variable, such as `tools`."""
        return variable in self._variables

    def check_roles(self, messages: Sequence[Message]) -> None:
        """Refuse roles that are neither standard nor in the template, which would silently drop them."""
        for i, message in enumerate(messages):
            role = message["role"]
            if role not in ROLES and (not role or role not in self._sources):
                roles = ", ".join(ROLES)
                raise RequestError(
                    f"messages.{i}.role: {role!r:.40} is not a role of this model; give one of {roles}.",
                    field="messages",
                )

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, answer: bool = True
    ) -> str:
        """Return the chat as text, up to the start of the model's answer.

        The text contains the special tokens: encode it with `special=False`. `answer=False` omits the
        generation prompt; `variables` are passed to the template, such as `tools`.
        """
        if self.is_plain:
            return "\n\n".join(str(message.get("content") or "") for message in messages)
        options = variables or {}
        context = {**self._special, **options, "messages": messages, "add_generation_prompt": answer}
        try:
            return (self._tool_use if options.get("tools") else self._template).render(context)
        except REFUSALS as error:
            raise RequestError(
                f"messages: the model's chat template refuses them ({error}); check roles, their order and "
                "contents",
                field="messages",
            ) from error


def load_template(folder: Path) -> ChatTemplate:
    """Read `chat_template.jinja`, else the one in `tokenizer_config.json`; log if there is none."""
    config = read_json(folder / "tokenizer_config.json")
    special = {name: text for name in SPECIAL if (text := _token(config.get(name))) is not None}
    path = folder / "chat_template.jinja"
    if has_file(path):
        try:
            tool_use = path.parent / "additional_chat_templates" / "tool_use.jinja"
            tool_template = tool_use.read_text("utf-8") if has_file(tool_use) else None
            return ChatTemplate(path.read_text("utf-8"), special, where=path, tool_use=tool_template)
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8; download it again", field=path.name) from error
    templates = config.get("chat_template")
    source = _named(templates, "default")
    if source is None:
        log.warning(
            "%s has no chat template: messages are joined as plain text; use completions for a base model",
            folder,
        )
    return ChatTemplate(
        source, special, where=folder / "tokenizer_config.json", tool_use=_named(templates, "tool_use")
    )


def render(folder: Path, messages: Sequence[Message]) -> str:
    """Render one chat with a checkpoint's template."""
    return load_template(folder).render(messages)


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file; empty without the file."""
    if not has_file(path):
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); download it again", field=path.name) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object; download it again", field=path.name)
    return config


def _token(value: Any) -> str | None:
    """Return a special token's text; some files store it as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _named(templates: Any, name: str) -> str | None:
    """Choose among named templates, as in older files; a single template is used for all chats."""
    if isinstance(templates, list):
        entries = [entry for entry in templates if isinstance(entry, dict)]
        templates = next((entry.get("template") for entry in entries if entry.get("name") == name), None)
    return templates if isinstance(templates, str) and templates.strip() else None


def _environment() -> ImmutableSandboxedEnvironment:
    """Build a sandbox with the globals that `transformers` gives templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: Any, indent: int | None = None, **settings: Any) -> str:
    """Serialise JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **settings)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
