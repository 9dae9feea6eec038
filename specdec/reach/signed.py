"""Signed requests and encrypted answers of the side channel: both sides prove the secret without sending it.

A request has the header `Authorization: Specdec-HMAC-SHA256 TIME NONCE BODY MAC`: seconds since 1970, a
random nonce, the SHA-256 of the body, and an HMAC of these three, the method and the path. The answer is
encrypted and authenticated with AES-GCM, under a key derived from the secret and the request's nonce.

Encryption makes relaying useless: servers have several names and may be behind NAT, so the receiver cannot
check for which address a request was signed. An impostor may pass a request on to another server, or replay
it to one that has restarted and forgotten its nonces, but it cannot read the answer.
"""

import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from specdec.reach.expiring_map import ExpiringMap
from specdec.reach.protocol import VARIABLE, ReachError, Secret, new_id

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SCHEME = "Specdec-HMAC-SHA256"
MOST_SKEW_S = 60
"""Maximum difference of the two servers' clocks."""
MOST_NONCES = 1 << 17
"""Maximum nonces stored: 1,000 requests a second. A full table takes 31 MB."""
AUTHORIZATION = re.compile(SCHEME + " ([0-9]{1,12}) ([0-9a-f]{32}) ([0-9a-f]{64}) ([0-9a-f]{64})")
IV_BYTES = 12
"""Random prefix of each ciphertext, so that a replayed request gets a different answer."""


class SignedRequest(NamedTuple):
    """The signed parts of a request."""

    method: str
    path: str
    """With the query, as sent."""
    time_s: int
    nonce: str
    body_sha256: str

    @classmethod
    def new(cls, method: str, path: str, body: bytes = b"") -> Self:
        return cls(method, path, int(time.time()), new_id(), hashlib.sha256(body).hexdigest())

    def authorization(self, secret: Secret) -> str:
        """Return the value of the `Authorization` header."""
        return f"{SCHEME} {self.time_s} {self.nonce} {self.body_sha256} {self._mac(secret)}"

    @classmethod
    def verified(cls, secret: Secret, method: str, path: str, headers: Sequence[str]) -> Self:
        """Return the request signed by the `Authorization` header; the caller must check the body's hash."""
        match = AUTHORIZATION.fullmatch(headers[0]) if len(headers) == 1 else None
        if match:
            signed = cls(method, path, int(match[1]), match[2], match[3])
            if hmac.compare_digest(signed._mac(secret), match[4]):
                return signed
        raise ReachError("unauthorized", f"Authorization: sign the request with this server's {VARIABLE}.")

    def encrypt(self, secret: Secret, status: int, body: bytes) -> bytes:
        """Return the encrypted body of an answer to this request."""
        iv = os.urandom(IV_BYTES)
        return iv + self._cipher(secret).encrypt(iv, body, str(status).encode())

    def decrypt(self, secret: Secret, status: int, data: bytes) -> bytes | None:
        """Return the decrypted body of an answer to this request; None if the secret does not match."""
        from cryptography.exceptions import InvalidTag

        iv, data = data[:IV_BYTES], data[IV_BYTES:]
        try:
            return self._cipher(secret).decrypt(iv, data, str(status).encode())
        except (InvalidTag, ValueError):  # ValueError if it is too short
            return None

    def _mac(self, secret: Secret) -> str:
        lines = (self.method, self.path, str(self.time_s), self.nonce, self.body_sha256)
        return secret.digest("request", "\n".join(lines)).hex()

    def _cipher(self, secret: Secret) -> "AESGCM":
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(secret.digest("answer", self.nonce))


class ReplayGuard:
    """Admits each signed request once. Only validly signed requests reach it and take memory."""

    def __init__(
        self, clock: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic
    ) -> None:
        """Compare signed times with `clock`; expire nonces by `elapsed`, a monotonic clock."""
        self._clock = clock
        # A nonce signed up to MOST_SKEW_S ahead of this clock stays valid for twice that.
        self._seen: ExpiringMap[str, bool] = ExpiringMap(elapsed, MOST_NONCES, 2 * MOST_SKEW_S + 1)

    def admit(self, signed: SignedRequest) -> None:
        """Record the nonce; raise a `ReachError` if it is known or its time is not this server's."""
        ahead_s = signed.time_s - int(self._clock())
        if abs(ahead_s) > MOST_SKEW_S:
            raise ReachError(
                "clock_skew",
                f"The clocks of the two servers differ: the request was signed {abs(ahead_s):,} s "
                f"{'ahead of' if ahead_s > 0 else 'behind'} this server's clock, and at most {MOST_SKEW_S} s "
                "are accepted; synchronize both clocks, for example with NTP.",
            )
        if self._seen.get(signed.nonce):
            raise ReachError(
                "replayed", "This request was received before; sign each request with a new nonce."
            )
        if len(self._seen) >= MOST_NONCES:
            raise ReachError("busy", "There were too many requests in the last two minutes; send fewer.")
        self._seen.put(signed.nonce, True)
