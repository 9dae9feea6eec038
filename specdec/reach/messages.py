"""Message bodies of the side channel: strictly validated JSON."""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from specdec.config.base import Settings
from specdec.errors import ConfigError
from specdec.reach.protocol import ReachError, Reason

MOST_TOKENS = 1 << 24
MOST_BLOCKS = 1 << 20
MOST_SUMS = 64
"""Maximum blocks per checksum request."""
MOST_BEATS = 4096
"""Maximum leases in a beat."""
MOST_HIDDEN = 1 << 20
MOST_METADATA = 1 << 20
MOST_AGENTS = 64
MOST_FACTS = 32
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

HEX_32 = "32 hexadecimal digits in lower case"
HEX_64 = "64 hexadecimal digits in lower case"
TOKENS = f"an integer from 0 to {MOST_TOKENS:,}"
BASE_64 = "base64"
Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Slot = Annotated[int, Field(ge=0, lt=1 << 31)]
Place = Annotated[int, Field(ge=0, lt=MOST_BLOCKS)]
Fact = Annotated[str, Field(max_length=200)]
Word = Annotated[str, Field(max_length=64)]
W = TypeVar("W", bound="ChannelMessage")


class ChannelMessage(Settings):
    """Base of request and response bodies."""

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse a body; raise a `ReachError` that names the invalid field."""
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            raise ReachError("malformed", "The body is not valid JSON; send one object.") from None
        if not isinstance(fields, dict):
            raise ReachError("malformed", "The body is not an object; send this route's fields.")
        try:
            return cls.model_validate(fields)
        except ConfigError as error:
            message = str(error).replace(f"{cls.__name__} has no setting", f"{cls.__name__} has no field")
            field = error.field if error.field in cls.model_fields else None
            raise ReachError("malformed", message, field=field) from None

    def write(self) -> bytes:
        return self.model_dump_json().encode()


class OpenRequest(ChannelMessage):
    """Open a lease or room, or query the progress of one this reader has opened."""

    engine: Id = Field(description=f"the engine's id: {HEX_32}")
    hash: Hash = Field(description=f"the prompt's hash: {HEX_64}")
    length: int = Field(ge=1, le=MOST_TOKENS, description=f"tokens of the prefix: {TOKENS}")
    num_cached: int = Field(ge=0, le=MOST_TOKENS, description=f"leading tokens with known blocks: {TOKENS}")
    reader: Id = Field(description=f"the reader's id, new for each fetch: {HEX_32}")


class CloseRequest(ChannelMessage):
    engine: Id = Field(description=f"the engine's id: {HEX_32}")
    reader: Id = Field(description=f"the reader's id: {HEX_32}")
    read: bool = Field(description="true if everything was read, else false")


class ChecksumRequest(ChannelMessage):
    """Request checksums of some blocks, and of the state if there is one."""

    engine: Id = Field(description=f"the engine's id: {HEX_32}")
    reader: Id = Field(description=f"the reader's id: {HEX_32}")
    indices: list[Place] = Field(max_length=MOST_SUMS, description=f"at most {MOST_SUMS} indices")


class ChecksumResponse(ChannelMessage):
    sums: list[int] = Field(max_length=MOST_SUMS + 1, description="64-bit sums, the state's last")


class CloseResponse(ChannelMessage):
    intact: bool = Field(description="true or false")


class HeartbeatRequest(ChannelMessage):
    engine: Id = Field(description=f"the engine's id: {HEX_32}")
    leases: list[Id] = Field(max_length=MOST_BEATS, description=f"at most {MOST_BEATS:,} of {HEX_32}")


class HeartbeatResponse(ChannelMessage):
    leases: list[Id] = Field(max_length=MOST_BEATS, description="the live leases among those sent")


class HiddenState(ChannelMessage):
    """A vector, bit-exact."""

    dtype: Literal["float64", "float32", "float16", "bfloat16"] = Field(
        description="float64, float32, float16 or bfloat16"
    )
    data: str = Field(max_length=MOST_HIDDEN, description=BASE_64)

    @classmethod
    def of(cls, hidden_1D: Tensor) -> Self:
        raw = hidden_1D.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        name = str(hidden_1D.dtype).removeprefix("torch.")
        return cls.model_validate({"dtype": name, "data": base64.b64encode(raw).decode()})

    @property
    def tensor(self) -> Tensor:
        dtype, raw = DTYPES[self.dtype], bytearray(unpack(self.data, "hidden"))
        if not raw or len(raw) % dtype.itemsize:
            raise ReachError("malformed", f"hidden: {len(raw)} bytes are not {self.dtype}.", field="hidden")
        return torch.frombuffer(raw, dtype=dtype)


class OpenResponse(ChannelMessage):
    """Location of a prefix's memory, as far as computed."""

    lease: Id = Field(description=HEX_32)
    length: int = Field(ge=1, le=MOST_TOKENS, description=TOKENS)
    ready: int = Field(ge=0, le=MOST_TOKENS, description=TOKENS)
    """Number of final tokens, all of whose blocks are now known; equal to `length` when complete."""
    first: int = Field(ge=0, le=MOST_BLOCKS, description="the index of the first block")
    blocks: list[Slot] = Field(max_length=MOST_BLOCKS, description="block ids")
    """From index `first` on; full blocks only, until all is ready."""
    state: Slot | None = Field(description="a state slot, or null")
    hidden: HiddenState | None = Field(description="a vector, or null")

    @property
    def is_whole(self) -> bool:
        return self.ready == self.length


class AgentInfo(ChannelMessage):
    """One rank's arena and how to reach it: enough to read the whole arena."""

    rank: int = Field(ge=0, lt=MOST_AGENTS, description="an integer from 0")
    metadata: str = Field(max_length=MOST_METADATA, description=BASE_64)
    arena: dict[str, Any] = Field(description="an object: the arena's address and layout")


class AgentsResponse(ChannelMessage):
    engine: Id = Field(description=HEX_32)
    fingerprint: Hash = Field(description=HEX_64)
    facts: dict[Word, Fact] = Field(max_length=MOST_FACTS, description="facts covered by the fingerprint")
    carrier: Word = Field(description="a name")
    agents: list[AgentInfo] = Field(min_length=1, max_length=MOST_AGENTS, description="one for each rank")


class ErrorResponse(ChannelMessage):
    """An error in the server's own format."""

    code: Word = Field(description="a reason")
    message: Annotated[str, Field(max_length=10_000)] = Field(description="a string")
    param: str | None = Field(description="the field at fault, or null")


def write_refusal(refusal: ReachError) -> bytes:
    error = {"code": refusal.reason, "message": str(refusal), "param": refusal.field}
    return json.dumps({"error": error}).encode()


def read_refusal(data: bytes, reasons: Mapping[Reason, int]) -> ReachError:
    """Parse a peer's refusal; any unknown answer becomes `garbled`."""
    try:
        error = ErrorResponse.model_validate(json.loads(data)["error"])
        reason = next(reason for reason in reasons if reason == error.code)
    except (ValueError, RecursionError, KeyError, TypeError, ConfigError, StopIteration):
        return ReachError(
            "garbled", "The peer's answer is unknown to this version; is its port a reach_port?"
        )
    return ReachError(reason, error.message, field=error.param)


def pack(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unpack(text: str, field: str) -> bytes:
    try:
        return base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, ValueError):
        raise ReachError(
            "malformed", f"{field}: it is not base64; send what a specdec server sends."
        ) from None
