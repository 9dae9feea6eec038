"""vLLM's two-step protocol: a prefill instance lends a prompt's cache, and a decode instance fetches it."""

import json

from specdec.ray.prompts import Prompt
from specdec.ray.spans import fields_of, with_fields

PATHS = {"/v1/completions", "/v1/chat/completions"}
DECODE_ONLY = ("echo", "prompt_logprobs")
"""Fields of requests for which the decode instance must compute the whole prompt."""
NO = {b"false", b"null"}
PARAMS = "kv_transfer_params"
ROOM = "bootstrap_room"
LEND = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's proxies send to a prefill instance."""


def is_two_step(path: str, prompt: Prompt) -> bool:
    """Return whether a prefill instance can prefill a request's prompt."""
    fields = prompt.fields
    if path not in PATHS or not fields or PARAMS in fields or ROOM in fields:
        return False
    return all(prompt.body[slice(*fields[name])] in NO for name in DECODE_ONLY if name in fields)


def prefill_body(prompt: Prompt) -> bytes:
    """Return the body for the prefill instance: it generates one token at most, and lends the prompt."""
    assert prompt.fields
    changes = {"max_tokens": b"1", "stream": b"false", PARAMS: json.dumps(LEND).encode()}
    others = {"max_completion_tokens": b"1", "stream_options": b"null", "min_tokens": b"0"}
    changes |= {name: value for name, value in others.items() if name in prompt.fields}
    return with_fields(prompt.body, prompt.fields, changes)


def transfer_params(answer: bytes) -> bytes | None:
    """Return where the prompt can be fetched, as the prefill instance wrote it."""
    try:
        fields = fields_of(answer)
    except (ValueError, RecursionError):
        return None
    found = answer[slice(*fields[PARAMS])] if PARAMS in fields else b"null"
    return None if found == b"null" else found


def decode_body(prompt: Prompt, params: bytes) -> bytes:
    """Return the body for the decode instance: the client's, with the transfer parameters."""
    assert prompt.fields
    return with_fields(prompt.body, prompt.fields, {PARAMS: params})
