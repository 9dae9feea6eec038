"""A request as the router sees it: its prompt's size, and hashes of its prefixes."""

import hashlib
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from specdec.ray.spans import Span, fields_of, value_of

FIRST = 512
"""Bytes of a prompt that choose between equal replicas."""
STEP = 64
"""Bytes between two hashed prefixes of a short prompt: enough to tell tenants and turns apart."""
LONGEST_PROMPT = 1 << 30
"""Bytes beyond which no prefix is hashed."""
MOST_KNOWN = 1 << 16
"""Hashed prefixes remembered of each replica, enough for 1,024 prompts of 8 KiB that share nothing."""
IN_ORDER = ("tools", "system", "instructions", "messages", "prompt", "input")
"""Fields that make a prompt, as chat templates put them."""
LOOKED_AT = ("model", "cache_salt", "stream", "previous_response_id")
LONGEST = 4096
"""Bytes of such a field's value; a longer one is none that a replica takes."""
OWNERS = ("Authorization", "x-api-key")
"""Headers that name a tenant: replicas share no prefix between two."""


def _lengths() -> Iterator[int]:
    length = STEP
    while length <= LONGEST_PROMPT:
        yield length
        length += max(STEP, 1 << length.bit_length() - 5)


LENGTHS = tuple(_lengths())
"""Lengths of the hashed prefixes: every STEP bytes up to 2 KiB, then 16 per doubling."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's body, looked at. `fields` is None where it is not a JSON object."""

    body: bytes = b""
    fields: Mapping[str, Span] | None = None
    model: str | None = None
    is_streamed: bool = False
    size: int = 0
    """Bytes of what is to be read."""
    beginnings: Sequence[bytes] = field(default=(), repr=False)
    """Hashes of the prefixes of these `LENGTHS`."""
    follows: str | None = None
    """The stored response that it continues."""
    key: bytes = b""
    """A hash of the first bytes, however few: equal prompts have equal ones."""


def look_at(body: bytes, headers: Mapping[str, str]) -> Prompt:
    """Parse a body for routing; nothing is changed or refused."""
    try:
        fields = fields_of(body)
        short = {name: fields[name] for name in LOOKED_AT if name in fields and _is_short(fields[name])}
        names = {name: value_of(body, short, name) for name in LOOKED_AT}
        owner = json.dumps([names["model"], names["cache_salt"], *(headers.get(name) for name in OWNERS)])
    except (ValueError, RecursionError):
        return Prompt(body)
    text = b"\0".join(body[slice(*fields[name])] for name in IN_ORDER if name in fields)
    chain = hashlib.blake2b(owner.encode(errors="surrogatepass"), digest_size=8)
    first = chain.copy()
    first.update(text[:FIRST])
    beginnings = []
    for start, end in pairwise((0, *LENGTHS[: bisect_right(LENGTHS, len(text))])):
        chain.update(text[start:end])
        beginnings.append(chain.digest())
    model, follows = names["model"], names["previous_response_id"]
    return Prompt(
        body,
        fields,
        model=model if isinstance(model, str) else None,
        is_streamed=names["stream"] is True,
        size=len(text),
        beginnings=beginnings,
        follows=follows if isinstance(follows, str) else None,
        key=first.digest(),
    )


def _is_short(span: Span) -> bool:
    return span[1] - span[0] <= LONGEST


class Known:
    """The beginnings of prompts that a replica was sent: those used last.

    A beginning is forgotten only after all longer ones that begin with it.
    """

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self.most = most
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def hit(self, prompt: Prompt) -> int:
        """Return how many bytes of a prompt the replica was sent before."""
        hit = 0
        for length, own in zip(LENGTHS, prompt.beginnings, strict=False):
            if own not in self._hashes:
                break
            hit = length
        return hit

    def note(self, prompt: Prompt) -> None:
        """Remember a prompt that was sent."""
        for own in reversed(prompt.beginnings):  # the shortest are used last
            self._hashes[own] = None
            self._hashes.move_to_end(own)
        while len(self._hashes) > self.most:
            self._hashes.popitem(last=False)

    def forget(self) -> None:
        """Drop all hashes: the replica may have restarted."""
        self._hashes.clear()
