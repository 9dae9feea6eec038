"""Base of other APIs' bodies, which are answered as chats."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from specdec.config.template import Variables
from specdec.server.bodies import KEPT, ChatBody, Duration
from specdec.server.failures import Failure, Names, validation_failure
from specdec.server.fields import given_fields
from specdec.server.messages import ChatMessage

SHARED = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "cache_salt", "chat_template_kwargs", "keep_alive"),
)


class Dialect(BaseModel):
    """Fields with the same meaning as in a chat; bounds are as in `SamplingParams`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Known but unsupported fields, with the values that request nothing."""
    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    """Known fields without effect on the answer."""
    NAMES: ClassVar[Names] = {}
    """This API's names for fields of a chat."""

    model: str | None = Field(None, description="the served model's name, as /v1/models lists it")
    stream: bool = False
    temperature: float | None = Field(None, description="0: greedy decoding; default 1")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(None, description="the same seed gives the same text, with drafts and without")
    cache_salt: SkipValidation[str | None] = Field(
        None, description="share cached prefixes and outputs only within this key and salt"
    )
    chat_template_kwargs: Variables | None = Field(None, description="variables of the chat template")
    keep_alive: Duration | None = Field(None, description=KEPT)

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Parse a body; raise for unsupported fields."""
        try:
            body = cls.model_validate(given_fields(data))
        except ValidationError as error:
            raise validation_failure(error) from None
        for name, value in (body.model_extra or {}).items():
            if name in cls.REFUSED and value not in cls.REFUSED[name]:
                raise Failure(400, f"{name}: this server does not support it; leave it out.", param=name)
        return body

    @property
    def names(self) -> Names:
        return self.NAMES

    @property
    def ignored(self) -> list[str]:
        """Ignored fields that clients may expect to have an effect: unknown ones, and tools."""
        return [name for name in self.model_extra or {} if name not in {*self.REFUSED, *self.HARMLESS}]

    def as_chat(self, messages: Sequence[ChatMessage], **overrides: Any) -> ChatBody:
        """Return a chat of these messages, with the shared fields and `overrides`."""
        shared = {name: getattr(self, name) for name in SHARED}
        fields = {name: value for name, value in {**shared, **overrides}.items() if value is not None}
        try:
            return ChatBody(messages=list(messages), **fields)
        except ValidationError as error:
            raise validation_failure(error) from None
