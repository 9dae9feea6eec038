"""Bodies as routers send them: from a client's body, one for the prefill and one for the decode instance.

Transcribed from vLLM's toy_proxy_server, llm-d's sidecar (nixlv2), production-stack's
disaggregated_prefill_orchestrated, and sglang-router's --pd-disaggregation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
NOTHING_YET = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Proxy:
    """A router that asks the prefill instance first, and passes its answer to the decode instance."""

    name: str
    to_prefill: Callable[[Body], Body]
    to_decode: Callable[[Body, Mapping[str, Any]], Body]


def toy_prefill(body: Body) -> Body:
    own = {**body, "kv_transfer_params": NOTHING_YET, "stream": False, "max_tokens": 1}
    if "max_completion_tokens" in own:
        own["max_completion_tokens"] = 1
    own.pop("stream_options", None)
    return own


def sidecar_prefill(body: Body) -> Body:
    own = {**body, "kv_transfer_params": NOTHING_YET, "stream": False}
    own.pop("stream_options", None)
    return own | {"max_tokens": 1, "max_completion_tokens": 1}


def stack_prefill(body: Body) -> Body:
    """Keep the client's stream_options in place."""
    return {**body, "kv_transfer_params": NOTHING_YET, "stream": False, "max_tokens": 1}


def with_params(body: Body, answer: Mapping[str, Any]) -> Body:
    return {**body, "kv_transfer_params": answer["kv_transfer_params"]}


def with_http_host(body: Body, answer: Mapping[str, Any]) -> Body:
    return {**body, "kv_transfer_params": answer["kv_transfer_params"] | {"remote_host": "127.0.0.1"}}


PROXIES = (
    Proxy("vLLM's toy proxy", toy_prefill, with_params),
    Proxy("llm-d's sidecar", sidecar_prefill, with_params),
    Proxy("production-stack", stack_prefill, with_http_host),
)


def sglang(body: Body, host: str, port: int, room: int) -> Body:
    """Return the body that sglang-router sends to both: it parses and rewrites the client's."""
    own = {**body, "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    if "messages" in own and "max_tokens" in own:
        own["max_completion_tokens"] = own.pop("max_tokens")
    return own | {
        "skip_special_tokens": True,
        "no_stop_trim": False,
        "ignore_eos": own.get("ignore_eos", False),
        "continue_final_message": False,
        "return_hidden_states": False,
        "stream": own.get("stream", False),
    }
