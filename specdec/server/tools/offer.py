"""The tools that a chat may call, in its model's call format."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from specdec.config.structured import LONGEST, Structure
from specdec.server.failures import Failure
from specdec.server.tools.bodies import AllowedToolChoice, NamedTool, Tool
from specdec.text.answers.calls import CallFormat, ToolCallReader
from specdec.text.answers.formats import CALL_FORMATS

Choice = Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice


def _whole_choice(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Report any error in a choice as one error."""
    try:
        return read(value)
    except ValidationError:
        raise PydanticCustomError("choice", CHOICES) from None


CHOICES = (
    'give auto, none, required, {"type": "function", "function": {"name": …}} or {"type": "allowed_tools", '
    '"allowed_tools": {"mode": …, "tools": […]}}'
)
GivenChoice = Annotated[Choice, WrapValidator(_whole_choice)]


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools of one chat and the model's call format."""

    tools: tuple[Tool, ...]
    form: CallFormat
    parallel: bool
    """Whether an answer may contain several calls."""
    structure: Structure | None
    """The structure of the answer if a call is required."""

    @property
    def plain(self) -> list[dict[str, Any]]:
        """Return the tools in the template's format."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def calls(self) -> ToolCallReader:
        """Return the calls an answer may contain."""
        functions = (tool.function for tool in self.tools)
        return ToolCallReader(self.form, {function.name: function.parameters or {} for function in functions})


def untold(tools: list[Tool] | None, choice: Choice | None, *, told: bool) -> list[str]:
    """Return the tool fields ignored because the template takes no tools and none is required."""
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolChoice) else choice
    if told or not tools or mode not in (None, "auto"):
        return []
    return ["tools", *(["tool_choice"] if choice else [])]


def make_offer(
    tools: list[Tool] | None,
    choice: Choice | None,
    *,
    parallel: bool,
    form: CallFormat | None,
    told: bool = True,
) -> ToolOffer | None:
    """Return the tools that a chat may call, or None. If the template takes no tools, it answers in text."""
    _check_names(tools or [])
    if untold(tools, choice, told=told):
        return None
    if isinstance(choice, AllowedToolChoice):
        tools, choice = _named(tools or [], choice.names), choice.allowed_tools.mode
    if choice == "none" or (not tools and choice in (None, "auto")):
        return None
    if not tools:
        raise Failure(400, "tool_choice: there are no tools to choose from; give tools.", param="tool_choice")
    if form is None:
        raise Failure(
            400,
            "tools: the chat template does not show this model's tool call format; name it with "
            f"--tool-call-parser ({', '.join(sorted(CALL_FORMATS))}), or leave tools out.",
            param="tools",
        )
    structure = None
    if choice == "required":
        structure = force(tools, form, several=parallel)
    elif isinstance(choice, NamedTool):
        structure = force(_named(tools, [choice.function.name]), form, several=False)
    return ToolOffer(tuple(tools), form, parallel, structure)


def _named(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    """Return the tools of these names in their own order; raise for an unknown name."""
    declared = {tool.function.name for tool in tools}
    for name in names:
        if name not in declared:
            raise Failure(400, f"tool_choice: none of the tools is named {name!r:.80}.", param="tool_choice")
    wanted = {*names}
    return [tool for tool in tools if tool.function.name in wanted]


FRAME = 130
"""Overhead of a structural tag in characters."""


def _check_names(tools: Sequence[Tool]) -> None:
    """Raise for tools with equal names, whose calls would be ambiguous."""
    names = Counter(tool.function.name for tool in tools)
    duplicate = next((name for name, count in names.items() if count > 1), None)
    if duplicate is not None:
        raise Failure(
            400, f"tools: more than one is named {duplicate!r:.80}; give each its own name.", param="tools"
        )


def force(tools: Sequence[Tool], form: CallFormat, *, several: bool) -> Structure:
    """Return the structural tag that forces one or several calls."""
    tags: list[dict[str, Any]] = []
    size = 0
    for function in (tool.function for tool in tools):
        begin, end = form.frame(function.name)
        schema = {"type": "object", **(function.parameters or {})}
        size += len(json.dumps(schema)) + len(begin) + len(end) + FRAME
        if size > LONGEST:
            raise Failure(
                400,
                f"tools: for a forced call they have more than {LONGEST:,} characters; give fewer, or "
                "choose one.",
                param="tools",
            )
        content = {"type": "json_schema", "json_schema": schema, "style": form.style}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    calls: dict[str, Any] = {"type": "tags_with_separator", "tags": tags, "separator": form.between}
    calls |= {"at_least_one": True, "stop_after_first": not several}
    literals = [{"type": "const_string", "value": text} for text in (form.before, form.behind)]
    structure = {"type": "sequence", "elements": [literals[0], calls, literals[1]]} if form.before else calls
    return Structure(structural_tag={"type": "structural_tag", "format": structure})
