"""Normalise prompts and parameters, one or many."""

import operator
import reprlib
from collections.abc import Mapping, Sequence
from typing import cast

from specdec.config.sampling import SamplingParams
from specdec.errors import RequestError

Prompt = str | Sequence[int]
"""Text or token ids."""


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, given one prompt (text or token ids) or many."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        items = list(prompts)
    except TypeError:
        raise _no_prompt(prompts) from None
    if isinstance(prompts, bytes | Mapping):
        raise _no_prompt(prompts)
    return [cast(Prompt, items)] if items and _is_number(items[0]) else cast(list[Prompt], items)


def _is_number(item: object) -> bool:
    """Return whether an item is a token id of any integer type."""
    try:
        operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def as_ids(prompt: object) -> list[int]:
    """Return token ids from any iterable of integers: a list, a tensor, an array."""
    try:
        items = list(prompt)  # type: ignore[call-overload]
        if isinstance(prompt, bytes | Mapping) or any(isinstance(item, bool) for item in items):
            raise TypeError
        return [operator.index(item) for item in items]
    except TypeError:
        raise _no_prompt(prompt) from None


def of_prompt(index: int, error: RequestError) -> RequestError:
    """Return an error that names the prompt's index."""
    return RequestError(f"prompts[{index}]: {str(error).removeprefix('prompt: ')}", field=error.field)


def _no_prompt(prompt: object) -> RequestError:
    return RequestError(
        f"prompt: {reprlib.repr(prompt)} is neither text nor token ids; give a string or integers.",
        field="prompt",
    )


def broadcast(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    params_list = list(params) if isinstance(params, Sequence) else [params]
    if invalid := [item for item in params_list if not isinstance(item, SamplingParams)]:
        raise RequestError(
            f"params: {reprlib.repr(invalid[0])} is not SamplingParams; write SamplingParams(max_tokens=…).",
            field="params",
        )
    if len(params_list) != count:
        raise RequestError(
            f"params: {len(params_list)} were given for {count} prompts; give one, or one for each prompt.",
            field="params",
        )
    return params_list
