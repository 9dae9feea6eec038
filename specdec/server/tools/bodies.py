"""Tools and calls in client requests."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdec.text.answers.source import LONGEST_NAME

LONGEST_READ = 1 << 18
"""Maximum characters of arguments that are parsed; longer ones are passed to the template as text."""


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str = Field(max_length=LONGEST_NAME, pattern=r"^[^\s<>]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="its parameters, as a JSON schema")


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BaseModel):
    model_config = ConfigDict(extra="allow")

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)]


class AllowedToolChoice(BaseModel):
    """A choice among some of the tools; the model only sees these."""

    model_config = ConfigDict(extra="allow")

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.allowed_tools.tools]


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str | dict[str, Any] | None = Field(None, description="JSON")


class ToolCall(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(extra="allow")

    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        """Return it in the template's format, with arguments as an object where possible."""
        fields = self.model_dump(exclude_unset=True)
        arguments = self.function.arguments
        if isinstance(arguments, str):
            try:
                value = json.loads(arguments or "{}") if len(arguments) <= LONGEST_READ else None
            except (ValueError, RecursionError):
                value = None
            arguments = value if isinstance(value, dict) else arguments
        fields["function"]["arguments"] = {} if arguments is None else arguments
        return fields
