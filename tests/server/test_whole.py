"""An answer that tells of much is written beside the event loop, which others wait for."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.core.outputs import Delta, TokenLogprob
from specdec.server import generate
from specdec.server.answers import Said
from specdec.server.chunks import Chunks
from specdec.server.formats import Completions, Shown
from specdec.server.state import LONG, Served
from specdec.server.threads import Pool

OWN = TokenLogprob(7, -0.5, top=tuple((token, -1.0) for token in range(20)))
CHOICES = 3


class Watched(Completions):
    """Notes in which thread a choice is written."""

    def __init__(self) -> None:
        super().__init__(None, Shown(prompt_logprobs=True), n=CHOICES)
        self.threads: set[threading.Thread] = set()

    def said(self, choice: int, delta: Delta) -> Any:
        self.threads.add(threading.current_thread())
        return super().said(choice, delta)


async def told(tokens: int) -> AsyncIterator[Said]:
    for choice in range(CHOICES):
        delta = Delta("x", (7,), choice, logprobs=(OWN,), prompt_logprobs=(None, *[OWN] * tokens))
        yield Said(choice, delta, ())


@pytest.mark.parametrize(("tokens", "beside"), [(1, False), (LONG // 20, True)])
def test_long_answers_are_written_beside_the_event_loop(tokens: int, beside: bool) -> None:
    form: Any = Watched()
    body: Any = SimpleNamespace(return_metrics=True)
    prepared: Any = [SimpleNamespace(params=SimpleNamespace(n=CHOICES), ids=(1,))]
    served: Any = SimpleNamespace(_workers=Pool("text", 1))
    parts: Any = (
        told(tokens),
        Chunks(form, body, 'a "model"', prepared),
        SimpleNamespace(said=lambda own: None),
        partial(Served.work, served, caller=""),
    )
    whole = json.loads(asyncio.run(generate._whole(*parts)))
    assert [own is not threading.main_thread() for own in form.threads] == [beside]
    assert list(whole) == ["id", "object", "created", "model", "choices", "usage", "metrics"]
    assert whole["object"] == "text_completion" and whole["model"] == 'a "model"'
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert all(len(choice["prompt_logprobs"]) == 1 + tokens for choice in whole["choices"])
