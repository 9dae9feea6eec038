"""Request fields about another server: vLLM's `kv_transfer_params`, and SGLang's `bootstrap_*`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from specdec.server.failures import Failure
from specdec.server.settings import Role

VERSION: Literal[1] = 1
"""Version of `kv_transfer_params.specdec`."""
MOST_ROOM = (1 << 63) - 1
Name = Annotated[str, Field(max_length=256)]
Port = Annotated[StrictInt, Field(ge=1, le=65535)]
Room = Annotated[StrictInt, Field(ge=0, le=MOST_ROOM)]


class LeaseTerms(BaseModel):
    """One prompt's lease, signed by the prefill instance."""

    lease: Name
    mac: Name
    tokens: Annotated[StrictInt, Field(ge=1)] | None = Field(
        None, description="prefix length in tokens that is lent; null: all but the last token"
    )


class SignedLeases(BaseModel):
    """specdec's own part of `kv_transfer_params`."""

    v: StrictInt
    leases: Annotated[list[LeaseTerms | None], Field(fail_fast=True)] | None = Field(
        None, description="one per prompt; null: nothing lent"
    )
    expires_in: float | None = None
    cached_only: StrictBool | None = Field(None, description="lend only the cached prefix; do not prefill")


class TransferParams(BaseModel):
    """vLLM's `kv_transfer_params`; other fields of its connectors are ignored."""

    model_config = ConfigDict(extra="allow")

    do_remote_decode: StrictBool | None = Field(
        None, description="prefill the prompt, hold it, and return how to fetch it"
    )
    do_remote_prefill: StrictBool | None = Field(
        None, description="fetch the prompt, as the prefill instance returned it"
    )
    remote_engine_id: Name | None = None
    remote_request_id: Name | None = None
    remote_host: Name | None = None
    remote_port: Port | None = None
    remote_block_ids: list[Any] | None = Field(None, description="used between specdec servers")
    tp_size: StrictInt | None = None
    remote_num_tokens: StrictInt | None = None
    transfer_mode: Name | None = None
    specdec: SignedLeases | None = None


class BootstrapFields(NamedTuple):
    """SGLang's fields of one prompt, which prefill and decode instances both get."""

    host: str | None
    port: int | None
    room: int


class FetchFields(NamedTuple):
    """Fetch the prompts from another server, and decode."""

    params: TransferParams | None
    rooms: tuple[BootstrapFields, ...]
    """One per prompt, if there are no `params`."""


class LendFields(NamedTuple):
    """Prefill the prompts for another server."""

    rooms: tuple[int, ...] | None
    """Rooms in which that server asks for them, one per prompt; None: it gets leases from this response."""
    fetch: FetchFields | None = None
    """How to fetch their prefixes, which that server has."""
    cached_only: bool = False
    """Lend only what is cached, without prefill."""


Asked = LendFields | FetchFields


def transfer_work(
    params: TransferParams | None, rooms: Sequence[BootstrapFields] | None, role: Role | None
) -> Asked | None:
    """Return this server's part by its role; None: answer normally. Raises for impossible requests."""
    if params is None and rooms is None:
        return None
    field = "bootstrap_room" if params is None else "kv_transfer_params"
    if role is None:
        raise Failure(
            400,
            f"{field}: this server does not support it; start it with SPECDEC_REACH_SECRET in its "
            "environment, or leave it out.",
            param=field,
        )
    if params is None:
        return _by_rooms(rooms or (), role)
    if rooms is not None:
        raise Failure(
            400, "bootstrap_room: kv_transfer_params is given too; leave one out.", param="bootstrap_room"
        )
    return _by_params(params, role)


def _by_rooms(rooms: Sequence[BootstrapFields], role: Role) -> Asked:
    if role == "both":
        raise Failure(
            400,
            "bootstrap_room: prefill and decode instances get the same one, and this server has both "
            "roles; start it with --role prefill or --role decode.",
            param="bootstrap_room",
        )
    if role == "prefill":
        return LendFields(tuple(fields.room for fields in rooms))
    for name, values in (
        ("bootstrap_host", [fields.host for fields in rooms]),
        ("bootstrap_port", [fields.port for fields in rooms]),
    ):
        if None in values:
            raise Failure(
                400, f"{name}: it is required with bootstrap_room; give the side channel's.", param=name
            )
    return FetchFields(None, tuple(rooms))


def _by_params(params: TransferParams, role: Role) -> Asked | None:
    lends, fetches = bool(params.do_remote_decode), bool(params.do_remote_prefill)
    extension = params.specdec
    cached_only = bool(extension and extension.cached_only)
    if cached_only and (fetches or not lends):
        raise Failure(
            400,
            "kv_transfer_params.specdec.cached_only: it needs do_remote_decode true and "
            "do_remote_prefill false; set them, or leave it out.",
            param="kv_transfer_params",
        )
    if fetches and extension and extension.leases is None:
        raise Failure(
            400,
            "kv_transfer_params.specdec.leases: it is missing; pass on what the prefill instance returned.",
            param="kv_transfer_params",
        )
    if (lends and role == "decode") or (fetches and role == "prefill"):
        name, verb = ("do_remote_decode", "lends") if role == "decode" else ("do_remote_prefill", "fetches")
        raise Failure(
            400,
            f"kv_transfer_params.{name}: this server's role is {role}, so it {verb} no prompts; send "
            "the request to another server, or start this one with --role both.",
            param="kv_transfer_params",
        )
    fetch = FetchFields(params, ()) if fetches else None
    return LendFields(None, fetch, cached_only) if lends else fetch


def each_of(field: str, value: Any, prompts: int, n: int) -> list[Any]:
    """Return a field's value per prompt; a single prompt may also have one per choice."""
    values = value if isinstance(value, list) else [value]
    if prompts == 1 and len(values) == n:
        return values[:1]  # sglang-router, like SGLang, sends one per choice; the choices share one prefill
    if len(values) != prompts:
        raise Failure(400, f"{field}: {len(values)} for {prompts} prompts; give one per prompt.", param=field)
    return values
