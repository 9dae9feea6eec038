"""Bodies of the tokenize and detokenize routes."""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from specdec.config.template import Variables
from specdec.server.bodies import Ids
from specdec.server.failures import validation_failure
from specdec.server.fields import given_fields, unknown
from specdec.server.messages import ChatMessage, Many
from specdec.server.tools.bodies import Tool


class PlainBody(BaseModel):
    """Fields of both routes."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None

    @property
    def ignored(self) -> list[str]:
        return unknown(self.model_extra or {})


class TokenizeBody(PlainBody):
    prompt: str | None = None
    messages: Many[ChatMessage] | None = None
    tools: Many[Tool] | None = None
    chat_template_kwargs: Variables | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(PlainBody):
    tokens: Ids


P = TypeVar("P", bound=PlainBody)


def read_plain(kind: type[P], data: bytes) -> P:
    """Parse a body. Null counts as absent."""
    try:
        return kind.model_validate(given_fields(data))
    except ValidationError as error:
        raise validation_failure(error) from None
