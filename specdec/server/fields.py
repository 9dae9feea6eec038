"""Unknown and unsupported fields: refused if they request something, else ignored."""

import itertools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec.server.failures import Failure
from specdec.server.parse import check_parts, parse

logger = logging.getLogger(__name__)

IGNORED = "x-specdec-ignored-fields"
"""The response header that lists the ignored fields of its request."""
MAX_TOKENS = "x-specdec-max-tokens"
"""Response header with a choice's maximum tokens, `max_tokens` cut to the context."""
MOST_NAMES, LONGEST_NAME = 16, 64
"""Maximum number and length of ignored fields in a header, and in the log: clients choose the names."""
MOST_LOGGED = 256
MOST_LEVELS = 128
"""Maximum nesting of objects and lists: twice that of a supported schema."""

HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "reasoning_effort", "verbosity", "stream_usage", "request_id", "rid"),
    *("length_penalty", "early_stopping", "spaces_between_special_tokens", "mm_processor_kwargs"),
    *("media_io_kwargs", "stream_reasoning", "guided_decoding_backend"),
}
"""Known and ignored: they would not change an answer. (Two of them only affect beam search.)"""
REFUSED: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "best_of": (),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "top_logprobs": (0,),
    "max_completion_tokens": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "prompt_embeds": (),
    "images": ([],),
    "image_data": (),
    "multi_modal_data": ({},),
    "input_embeds": (),
    "truncate_prompt_tokens": (0,),
    "add_special_tokens": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding": (),
    "guided_whitespace_pattern": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "structural_tag": (),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "thinking_token_budget": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": (),
    "vllm_xargs": ({},),
    "lora_path": (),
    "session_params": (),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
    "cache_control": (),
    "cache_marks": ([],),
}
"""Known but unsupported, with the values that request nothing. Some are supported in one body only."""
FORM = 'give structured_outputs: {"json": …}, {"regex": …}, {"choice": …} or {"grammar": …}'
MARK = 'put "cache_control": {"type": "ephemeral"} on a message of a chat, or on a part of its content'
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
            *("regex", "ebnf", "json_schema", "structural_tag"),
        ),
        FORM,
    ),
    "best_of": "leave it out, or make it equal to n",
    "top_logprobs": "give logprobs a number",
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens"), "give max_tokens"),
    "min_new_tokens": "give min_tokens",
    **dict.fromkeys(("cache_control", "cache_marks"), MARK),
}
"""Remedy, if not just to leave the field out."""


def given_fields(data: bytes) -> dict[str, Any]:
    """Parse a body into its fields."""
    try:
        fields = parse(data)
    except RecursionError:  # the parser's own limit is above ours
        raise _too_deep() from None
    except ValueError:
        raise Failure(400, "the body is not JSON; send one object, as UTF-8.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise Failure(400, "the body is not a JSON object; send one with the fields of the request.")
    _check_shape(fields)
    return {name: value for name, value in fields.items() if value is not None}


def _too_deep() -> Failure:
    return Failure(400, f"the body nests more than {MOST_LEVELS} levels; send fewer.")


def _check_shape(body: dict[str, Any]) -> None:
    """Raise for a body that nests too deep for recursive parsers, or has too many parts."""
    level: list[Any] = [body]
    levels = parts = 0
    while level:
        levels += 1
        parts += sum(1 + len(value) if type(value) is dict else 1 for value in level)
        if levels > MOST_LEVELS:
            raise _too_deep()
        check_parts(parts)
        inside = itertools.chain.from_iterable(
            value.values() if type(value) is dict else value for value in level
        )
        level = [value for value in inside if type(value) is dict or type(value) is list]


def refuse(extra: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise for fields that request something unsupported; the values in `defaults` are harmless."""
    for name, value in extra.items():
        if name in REFUSED and value not in (*REFUSED[name], defaults.get(name)):
            remedy = INSTEAD.get(name, "leave it out")
            raise Failure(400, f"{name}: this server does not support it; {remedy}.", param=name)


def unknown(extra: Iterable[str]) -> list[str]:
    """Return the unknown fields, which are ignored."""
    return [name for name in extra if name not in REFUSED and name not in HARMLESS]


class IgnoredFields:
    """Reports ignored fields: to clients in a header, to the log once per name."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def headers(self, names: Sequence[str]) -> dict[str, str]:
        """Return the header that lists them, restricted to valid header characters."""
        if not names:
            return {}
        shortened = [name[:LONGEST_NAME] for name in names[:MOST_NAMES]]
        safe = [re.sub(r"[^\w.\-]", "_", name, flags=re.ASCII) for name in shortened]
        for name in safe:
            if name not in self._logged and len(self._logged) < MOST_LOGGED:
                self._logged.add(name)
                logger.info("ignoring the request field %s (logged once)", name)
        more = [f"+{len(names) - MOST_NAMES}"] if len(names) > MOST_NAMES else []
        return {IGNORED: ", ".join([*safe, *more])}
