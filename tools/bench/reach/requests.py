"""Requests: parts of the shipped texts, each with a new salt, so that no cache helps."""

import random
import secrets
from typing import Any

from specdec.bench.acceptance.prompts import bundled
from specdec.text.tokenizer import Tokenizer


class RequestBodies:
    """Draw bodies of completion requests."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._random = random.Random(seed)
        texts = (prompt.text for prompt in bundled() if prompt.text)
        self._ids = [token for text in texts for token in tokenizer.encode(text, special=False)]

    def draw(self, prompt_tokens: int, max_tokens: int, *, temperature: float = 0.0) -> dict[str, Any]:
        """Return a body whose prompt starts at a random position of the texts, wrapping around."""
        start = self._random.randrange(len(self._ids))
        whole = self._ids * (2 + prompt_tokens // len(self._ids))
        return {
            "prompt": whole[start : start + prompt_tokens],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": self._random.getrandbits(31),
            "ignore_eos": True,
        }


def salted(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body that shares no cached prefix with any earlier one."""
    return {**body, "cache_salt": secrets.token_hex(8)}
