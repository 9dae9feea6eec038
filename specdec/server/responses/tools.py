"""Tools of the Responses API, converted to functions for the model."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from specdec.server.failures import Failure, validation_failure
from specdec.server.messages import Many
from specdec.server.responses.items import flat_name
from specdec.server.tools.bodies import (
    AllowedToolChoice,
    AllowedTools,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
)
from specdec.server.tools.offer import Choice
from specdec.text.answers.source import LONGEST_NAME

INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a custom tool: a string."""


class FunctionTool(Function):
    type: Literal["function"]


class CustomTool(BaseModel):
    """A tool that takes a string; the model sees a function with one parameter, `input`."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom"]
    name: str = Field(max_length=LONGEST_NAME, pattern=r"^[^\s<>]+$")
    description: str | None = None


class HostedTool(BaseModel):
    """A tool that OpenAI runs itself, such as web_search. Not available here, so it is ignored."""

    model_config = ConfigDict(extra="allow")

    type: str


def _type(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return kind if kind in ("function", "custom", "namespace") else "built_in"


Own = Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")]
Leaf = Annotated[Own | Annotated[HostedTool, Tag("built_in")], Discriminator(_type)]


class ToolNamespace(BaseModel):
    """A group of tools, such as an MCP server's."""

    model_config = ConfigDict(extra="allow")

    type: Literal["namespace"]
    name: str = Field(max_length=128)
    tools: Many[Leaf]


AnyTool = Annotated[
    Own | Annotated[ToolNamespace, Tag("namespace")] | Annotated[HostedTool, Tag("built_in")],
    Discriminator(_type),
]


class ChosenTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: "Many[ChosenTool]" = Field(default=[], description="those of allowed_tools")

    @property
    def named(self) -> NamedTool | None:
        """Return the tool in the chat API's format, if supported."""
        if self.type not in ("function", "custom") or self.name is None:
            return None
        function = NamedFunction(name=flat_name(self.name, self.namespace))
        return NamedTool(type="function", function=function)


class ClientTool(NamedTuple):
    """A tool by its client names."""

    name: str
    namespace: str | None
    is_custom: bool


class Toolbox:
    """A request's tools in the chat API's format, and how to report calls of each."""

    def __init__(self, tools: Iterable[AnyTool]) -> None:
        self.tools: list[Tool] = []
        self.known: dict[str, ClientTool] = {}
        """By the model's name."""
        self.left_out: dict[str, None] = {}
        """Unsupported tool types, each once."""
        for tool in tools:
            if isinstance(tool, ToolNamespace):
                for nested in tool.tools:
                    self._add(nested, tool.name)
            else:
                self._add(tool, None)

    def _add(self, tool: FunctionTool | CustomTool | HostedTool, namespace: str | None) -> None:
        if isinstance(tool, HostedTool):
            self.left_out[f"tools.{tool.type}"] = None
            return
        name = flat_name(tool.name, namespace)
        self.known[name] = ClientTool(tool.name, namespace, isinstance(tool, CustomTool))
        fields = tool.model_dump(exclude_unset=True, exclude={"type"})
        if isinstance(tool, CustomTool):
            fields = {name: fields[name] for name in ("name", "description") if name in fields} | {
                "parameters": INPUT
            }
        try:
            function = Function(**fields | {"name": name})
        except ValidationError as error:  # the combined name may be too long
            raise Failure(
                400, f"tools: {namespace!r:.80}: {validation_failure(error)}", param="tools"
            ) from None
        self.tools.append(Tool(type="function", function=function))

    def called(self, name: str) -> ClientTool:
        """Return the tool of a call; the model may call unknown ones."""
        return self.known.get(name) or ClientTool(name, None, False)

    def choice(self, choice: str | ChosenTool | None) -> Choice | None:
        """Return the tool choice in the chat API's format."""
        if not isinstance(choice, ChosenTool):
            return choice  # type: ignore[return-value]
        if choice.type == "allowed_tools":
            served = [name for entry in choice.tools if (name := entry.named)]
            return AllowedToolChoice(
                type=choice.type, allowed_tools=AllowedTools(mode=choice.mode, tools=served)
            )
        if name := choice.named:
            return name
        raise Failure(
            400,
            f"tool_choice: {choice.type!r:.40} is not supported; give auto, none, required, "
            '{"type": "function", "name": …} or {"type": "allowed_tools", "mode": …, "tools": […]}.',
            param="tool_choice",
        )
