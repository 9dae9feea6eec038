"""What both sides of a fetch agree on: the secret, what it signs, the hashes, and why either refuses."""

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

VERSION = 1
"""Of the protocol; a part of the fingerprint, so that no two of them ever talk."""
VARIABLE = "SPECDEC_REACH_SECRET"
SHORTEST_SECRET = 16
MOST_ROOM = (1 << 63) - 1
LEASE_MAX_S = 300.0
"""For which a lease is held at most, however alive its reader is."""
SILENCE_S = 30.0
"""Without a beat, after which a lease ends."""
BEAT_S = 5.0
WAIT_S = 5.0
"""For which one request of the side channel waits at most."""

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
"""By reason, the status of an answer of the side channel. The rest are those of the fetching side."""


class Refusal(SpecdecError):
    """Why one side does not do what the other asks; the fetching side then prefills the prompt itself."""

    def __init__(self, reason: Reason, message: str, *, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.reason = reason

    @property
    def status(self) -> int:
        return STATUSES.get(self.reason, 500)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What identifies the beginning of a prompt: each side computes it from its own tokens."""

    hash: str
    length: int
    salt: str
    """The hash of the request's `cache_salt`."""

    @classmethod
    def of(cls, ids: Sequence[int], salt: str = "") -> Self:
        """Hash the tokens together with the salt, so that salts never mix across engines."""
        hashed_salt = hashlib.sha256(salt.encode()).digest()
        tokens = np.asarray(ids, np.dtype("<i4")).tobytes()
        return cls(hashlib.sha256(hashed_salt + tokens).hexdigest(), len(ids), hashed_salt.hex())


@dataclass(frozen=True, slots=True)
class LeaseReference:
    """What a request says of a lease, as vLLM's routers carry it. Trust nothing of it before its mac."""

    host: str
    port: int
    engine: str
    lease: str
    mac: str
    tokens: int | None = None
    """At the prompt's beginning, which it covers; None: all but the last one."""


@dataclass(frozen=True, slots=True)
class RoomReference:
    """What a request says of a room, as SGLang's routers carry it: no mac, so the prompt's hash must do."""

    host: str
    port: int
    room: int


Reference = LeaseReference | RoomReference


class Secret:
    """The key that all engines of a deployment share. Its text is in no `repr`, log or error."""

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
        """Read the secret from the environment; None where it is not set."""
        text = environment.get(VARIABLE)
        return None if text is None else cls(text.strip())

    def sign(self, engine: str, lease: str, prompt: Prompt) -> str:
        """Return the mac of a lease: which engine holds which prompt, but not at which address.

        What model that engine has is said, and compared, when it is met.
        """
        claim = [engine, lease, prompt.hash, prompt.length, prompt.salt]
        return self.digest("lease", json.dumps(claim)).hex()

    def verifies(self, reference: LeaseReference, prompt: Prompt) -> bool:
        """Return whether a lease was signed with this secret, for this prompt."""
        mac = self.sign(reference.engine, reference.lease, prompt)
        return hmac.compare_digest(mac.encode(), reference.mac.encode(errors="surrogateescape"))

    def digest(self, purpose: str, text: str) -> bytes:
        """Return the HMAC-SHA256 of a text for one purpose: a signature for one is not valid for another."""
        said = f"specdec reach {VERSION} {purpose}\n{text}"
        return hmac.digest(self._key, said.encode(errors="surrogateescape"), "sha256")


def new_id() -> str:
    """Draw the id of an engine's life, a lease or a reader: 128 bits that cannot be guessed."""
    return secrets.token_hex(16)


def hash_facts(facts: Mapping[str, str]) -> str:
    """Return the fingerprint of what two engines must have in common, such as model, layout and dtypes."""
    said = json.dumps([VERSION, sorted(facts.items())])
    return hashlib.sha256(said.encode()).hexdigest()


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Name the facts in which two engines differ."""
    return ", ".join(
        f"{name} is {theirs.get(name, 'missing')!s:.40} there and {ours.get(name, 'missing')!s:.40} here"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    )
