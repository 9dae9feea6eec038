"""Messages for invalid fields of a body, in place of pydantic's."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

FITS = {
    "missing": "it is required",
    "extra_forbidden": "it is not a known field; leave it out",
    "string_type": "give a string",
    "string_unicode": "give a string in valid Unicode",
    "string_pattern_mismatch": "it has characters that it must not have; it must match {pattern}",
    "string_too_short": "give at least {min_length:,} characters",
    "string_too_long": "give at most {max_length:,} characters",
    "bool": "give true or false",
    "int": "give an integer",
    "float": "give a number",
    "finite_number": "give a finite number",
    "list_type": "give a list",
    "dict_type": "give an object",
    "model_type": "give an object",
    "model_attributes_type": "give an object",
    "too_short": "give at least {min_length:,}",
    "too_long": "give at most {max_length:,}",
    "greater_than": "give a number above {gt:,}",
    "greater_than_equal": "give a number of at least {ge:,}",
    "less_than": "give a number below {lt:,}",
    "less_than_equal": "give a number of at most {le:,}",
    "literal_error": "give {expected}",
    "enum": "give {expected}",
    "union_tag_invalid": "give a type of {expected_tags}",
    "union_tag_not_found": "give its type",
}
"""By pydantic's error type, or its part before the first underscore."""


def remedy(error: ErrorDetails) -> str:
    """Return the remedy without a period; our own errors contain it."""
    kind = error["type"]
    template = FITS.get(kind) or FITS.get(kind.partition("_")[0])
    return template.format_map(_plain(error.get("ctx", {}))) if template else error["msg"]


def _plain(context: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error's values; names are quoted as in JSON."""
    return {
        name: value.replace("'", '"') if name.startswith("expected") else value
        for name, value in context.items()
    }
