"""Signed requests and answers of the side channel: each side proves that it knows the secret; it is not sent.

A request has the header `Authorization: Specdec-HMAC-SHA256 TIME NONCE BODY MAC`: seconds since 1970, a
random nonce, the SHA-256 of the body, and an HMAC of these three, the method and the path. An answer has the
header `X-Specdec-Signature: SALT MAC`: an HMAC of the request's nonce, the status, the salt and the body's
SHA-256.

The body of a signed answer is encrypted with a key of its own, derived from the secret, the request's nonce
and the salt. This makes relaying useless: servers have several names and may be behind NAT, so the receiver
cannot check for which address a request was signed. An impostor may pass a request on to another server, or
replay it to one that has restarted and forgotten its nonces, but it cannot read the answer.
"""

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from specdec.reach.recent import Recent
from specdec.reach.terms import VARIABLE, Refusal, Secret, new_id

SCHEME = "Specdec-HMAC-SHA256"
ANSWER_HEADER = "X-Specdec-Signature"
MOST_SKEW_S = 60
"""Between the two servers' clocks."""
MOST_NONCES = 1 << 17
"""Remembered at once: 1,000 requests a second. A full table takes 31 MB."""
AUTHORIZATION = re.compile(SCHEME + " ([0-9]{1,12}) ([0-9a-f]{32}) ([0-9a-f]{64}) ([0-9a-f]{64})")
ANSWER = re.compile("([0-9a-f]{32}) ([0-9a-f]{64})")


class SignedRequest(NamedTuple):
    """What the signature of a request covers."""

    method: str
    path: str
    """With the query, as it is sent."""
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
        """Return the request that the `Authorization` headers sign; its body is still to be compared."""
        found = AUTHORIZATION.fullmatch(headers[0]) if len(headers) == 1 else None
        if found:
            signed = cls(method, path, int(found[1]), found[2], found[3])
            if hmac.compare_digest(signed._mac(secret), found[4]):
                return signed
        raise Refusal("unauthorized", f"Authorization: sign the request with this server's {VARIABLE}.")

    def encrypt(self, secret: Secret, status: int, body: bytes) -> tuple[str, bytes]:
        """Return the signature header's value and the body of an answer to this request."""
        salt = new_id()
        data = self._encrypted(secret, salt, body)
        return f"{salt} {self._answer_mac(secret, status, salt, data)}", data

    def decrypt(self, secret: Secret, status: int, headers: Sequence[str], data: bytes) -> bytes | None:
        """Return the body of an answer to this request; None if its signature is missing or wrong."""
        found = ANSWER.fullmatch(headers[0]) if len(headers) == 1 else None
        if not found or not hmac.compare_digest(self._answer_mac(secret, status, found[1], data), found[2]):
            return None
        return self._encrypted(secret, found[1], data)

    def _mac(self, secret: Secret) -> str:
        lines = (self.method, self.path, str(self.time_s), self.nonce, self.body_sha256)
        return secret.digest("request", "\n".join(lines)).hex()

    def _answer_mac(self, secret: Secret, status: int, salt: str, data: bytes) -> str:
        lines = (self.nonce, str(status), salt, hashlib.sha256(data).hexdigest())
        return secret.digest("answer", "\n".join(lines)).hex()

    def _encrypted(self, secret: Secret, salt: str, data: bytes) -> bytes:
        """XOR with a key as long as the data and used once; twice is the identity."""
        key = secret.digest("encrypt", f"{self.nonce}\n{salt}")
        pad = hashlib.shake_256(key).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")).to_bytes(len(data), "big")


class ReplayGuard:
    """Admits each signed request once; what has no valid signature never gets here, so it costs no memory."""

    def __init__(
        self, clock: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic
    ) -> None:
        """Compare signed times with `clock`; remember nonces by `elapsed`, a monotonic clock."""
        self._clock = clock
        # A nonce signed up to MOST_SKEW_S ahead of this clock stays valid for twice that.
        self._seen: Recent[str, bool] = Recent(elapsed, MOST_NONCES, 2 * MOST_SKEW_S + 1)

    def admit(self, signed: SignedRequest) -> None:
        """Record the nonce; raise a `Refusal` if it is known or its time is not this server's."""
        ahead_s = signed.time_s - int(self._clock())
        if abs(ahead_s) > MOST_SKEW_S:
            raise Refusal(
                "clock_skew",
                f"The clocks of the two servers differ: the request was signed {abs(ahead_s):,} s "
                f"{'ahead of' if ahead_s > 0 else 'behind'} this server's clock, and at most {MOST_SKEW_S} s "
                "are accepted; synchronize both clocks, for example with NTP.",
            )
        if self._seen.get(signed.nonce):
            raise Refusal("replayed", "This request was received before; sign each request with a new nonce.")
        if len(self._seen) >= MOST_NONCES:
            raise Refusal("busy", "There were too many requests in the last two minutes; send fewer.")
        self._seen.put(signed.nonce, True)
