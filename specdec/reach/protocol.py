"""The fetch protocol: the secret, signatures, hashes, and reasons for refusal."""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from specdec.errors import ConfigError, SpecdecError

VERSION = 2
"""Protocol version; part of signatures and the fingerprint, so that different versions never talk."""
VARIABLE = "SPECDEC_REACH_SECRET"
SHORTEST_SECRET = 16
MOST_ROOM = (1 << 63) - 1
LEASE_MAX_S = 300.0
"""Maximum seconds of a lease, even with a live reader."""
SILENCE_S = 30.0
"""Seconds without a beat after which a lease ends."""
BEAT_S = 5.0
WAIT_S = 5.0
"""Maximum seconds that a side-channel request waits."""

Reason = Literal[
    "unauthorized",
    "clock_skew",
    "replayed",
    "malformed",
    "too_large",
    "slow_body",
    "no_route",
    "unknown_lease",
    "unknown_room",
    "other_engine",
    "other_prompt",
    "held",
    "room_used",
    "lease_over",
    "prefill_failed",
    "busy",
    "internal",
    "not_allowed",
    "bad_mac",
    "fingerprint",
    "layout",
    "carrier",
    "peer_down",
    "peer_slow",
    "garbled",
]
STATUSES: Mapping[Reason, int] = {
    "unauthorized": 401,
    "clock_skew": 401,
    "replayed": 401,
    "malformed": 400,
    "too_large": 413,
    "slow_body": 408,
    "no_route": 404,
    "unknown_lease": 404,
    "unknown_room": 404,
    "other_engine": 404,
    "other_prompt": 409,
    "held": 409,
    "room_used": 409,
    "lease_over": 410,
    "prefill_failed": 503,
    "busy": 503,
    "internal": 500,
}
"""HTTP status by reason. The remaining reasons occur on the fetching side only."""


class ReachError(SpecdecError):
    """Reason why one side refuses; the fetching side then prefills the prompt itself."""

    def __init__(self, reason: Reason, message: str, *, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.reason = reason

    @property
    def status(self) -> int:
        return STATUSES.get(self.reason, 500)


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """Identity of a prefix, which each side computes from its own tokens."""

    hash: str
    length: int
    salt: str
    """Hash of the request's `cache_salt`."""

    @classmethod
    def of(cls, ids: Sequence[int], salt: str = "") -> Self:
        """Hash the tokens together with the salt, so that salts never mix across engines."""
        hashed_salt = hashlib.sha256(salt.encode()).digest()
        tokens = np.asarray(ids, np.dtype("<i4")).tobytes()
        return cls(hashlib.sha256(hashed_salt + tokens).hexdigest(), len(ids), hashed_salt.hex())


@dataclass(frozen=True, slots=True)
class LeaseReference:
    """Reference to a lease, as passed on by vLLM's routers. Untrusted until its mac is verified."""

    host: str
    port: int
    engine: str
    lease: str
    mac: str
    tokens: int | None = None
    """Number of prefix tokens it covers; None: all but the last."""


@dataclass(frozen=True, slots=True)
class RoomReference:
    """Reference to a room, as passed on by SGLang's routers. Has no mac; the prompt's hash must match."""

    host: str
    port: int
    room: int


Reference = LeaseReference | RoomReference


class Secret:
    """The secret shared by all engines of a deployment. Its text is in no `repr`, log or error."""

    def __init__(self, text: str) -> None:
        if len(text) < SHORTEST_SECRET or not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError(
                f"{VARIABLE}: give at least {SHORTEST_SECRET} printable ASCII characters without spaces, the "
                "same to all servers; `openssl rand -hex 32` makes some.",
                field=VARIABLE,
            )
        self._key = text.encode()

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Return the secret from the environment; None if unset."""
        text = environment.get(VARIABLE)
        return None if text is None else cls(text.strip())

    def sign(self, engine: str, lease: str, prompt: PrefixIdentity) -> str:
        """Return the mac of a lease, which binds engine and prompt but not the address.

        The engine's model is compared in the handshake.
        """
        claim = [engine, lease, prompt.hash, prompt.length, prompt.salt]
        return self.digest("lease", json.dumps(claim)).hex()

    def verifies(self, reference: LeaseReference, prompt: PrefixIdentity) -> bool:
        """Return whether a lease was signed with this secret, for this prompt."""
        mac = self.sign(reference.engine, reference.lease, prompt)
        return hmac.compare_digest(mac.encode(), reference.mac.encode(errors="surrogateescape"))

    def digest(self, purpose: str, text: str) -> bytes:
        """Return a string's HMAC-SHA256 for one purpose; it is not valid for other purposes."""
        message = f"specdec reach {VERSION} {purpose}\n{text}"
        return hmac.digest(self._key, message.encode(errors="surrogateescape"), "sha256")


def new_id() -> str:
    """Return a random 128-bit id for an engine process, a lease or a reader."""
    return secrets.token_hex(16)


def hash_facts(facts: Mapping[str, str]) -> str:
    """Return the fingerprint of an engine's facts, such as model, layout and dtypes."""
    message = json.dumps([VERSION, sorted(facts.items())])
    return hashlib.sha256(message.encode()).hexdigest()


def differences(remote: Mapping[str, str], local: Mapping[str, str]) -> str:
    """Describe the facts in which two engines differ."""
    return ", ".join(
        f"{name} is {remote.get(name, 'missing')!s:.40} there and {local.get(name, 'missing')!s:.40} here"
        for name in sorted({*remote, *local})
        if remote.get(name) != local.get(name)
    )
