"""Structured output: the grammar of a request's output."""

import json
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from specdec.config.base import Settings, contradiction, plain
from specdec.config.fields import switch

LONGEST = 32 << 10
"""Maximum characters of a grammar source: one of a thousand properties takes seconds to compile."""
Text = Annotated[str, Field(min_length=1)]


def _own_json(value: object) -> object:
    """Copy a mapping via JSON, since its caller may change it later."""
    try:
        return json.loads(json.dumps(value, default=_as_json)) if isinstance(value, dict) else value
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it nests too deep" if isinstance(error, RecursionError) else f"{error}"
        raise contradiction(
            "structured_outputs",
            f"the schema is not JSON ({reason}); give numbers, strings, lists and mappings.",
        ) from None


def _as_json(value: object) -> object:
    plain_value = plain(value)
    if plain_value is value:
        raise TypeError(f"a {type(value).__name__} is in it")
    return plain_value


Json = Annotated[dict[str, Any] | Text | None, BeforeValidator(_own_json)]


class Structure(Settings):
    """Grammar of the output; exactly one field is set. Sampled and drafted tokens always conform."""

    json_schema: Json = Field(
        None,
        title="JSON that matches this schema",
        description="a JSON schema, as a mapping or a string, or None",
    )
    json_object: bool = switch(False, "any JSON object")
    regex: Text | None = Field(
        None, title="text that matches this regular expression", description="a regular expression, or None"
    )
    choice: list[Text] | None = Field(
        None,
        min_length=1,
        fail_fast=True,
        title="one of these strings",
        description="a list of strings, or None",
    )
    grammar: Text | None = Field(
        None,
        title="text of this grammar: EBNF whose first rule is `root`, or Lark",
        description="a grammar in EBNF (root ::= …) or Lark (start: …), or None",
    )
    structural_tag: Json = Field(
        None,
        title="strings and schemas between tags, in vLLM's format",
        description="a structural tag, as a mapping or a string, or None",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        constraints = self._given
        if len(constraints) != 1:
            names = ", ".join(constraints or type(self).model_fields)
            raise contradiction(
                constraints[1] if constraints else "structured_outputs",
                f"give exactly one constraint: {len(constraints)} are given; leave one of {names}.",
            )
        if len(self.source) > LONGEST:
            size = len(self.source)
            raise contradiction(self.kind, f"it has {size:,} characters and may have {LONGEST:,}.")
        return self

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return self._given[0]

    @property
    def _given(self) -> list[str]:
        """Fields that are set; an empty schema counts as one, which fits everything."""
        return [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]

    @property
    def source(self) -> str:
        """Its source text, which identifies equal grammars."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)
