"""Large answers: serialised in pieces beside the event loop, in bounded memory, or refused."""

import asyncio
import json
import threading
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from specdec.config.sampling import SamplingParams
from specdec.core.outputs import CollectedOutput, Delta, TokenLogprob
from specdec.core.params import PreparedPrompt, ValidatedParams
from specdec.server import generate
from specdec.server.answers import NewOutput, check_size
from specdec.server.chunks import Chunks
from specdec.server.failures import Failure
from specdec.server.formats import CompletionFormat, LazyJsonList, ShownFields, written
from specdec.server.state import LONG
from specdec.server.streams import AT_A_TIME, send_pieces
from specdec.text.tokenizer import TextPiece
from specdec.verify.logprobs import TopTokens

OWN = TokenLogprob(7, -0.5, top=tuple((token, -1.0) for token in range(20)))
CHOICES = 3


class Watched(CompletionFormat):
    """Record in which thread a choice is serialised."""

    def __init__(self) -> None:
        super().__init__(None, ShownFields(prompt_logprobs=True), n=CHOICES)
        self.threads: set[threading.Thread] = set()

    def said(self, choice: int, delta: Delta) -> Any:
        self.threads.add(threading.current_thread())
        return super().said(choice, delta)


async def told(tokens: int) -> AsyncIterator[NewOutput]:
    for choice in range(CHOICES):
        delta = Delta("x", (7,), choice, logprobs=(OWN,), prompt_logprobs=(None, *[OWN] * tokens))
        yield NewOutput(choice, delta, ())


class Client:
    """A response whose client reads only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data, self.largest, self.is_whole = bytearray(), 0, False
        client = self

        class Response(web.StreamResponse):
            prepared = False

            async def prepare(self, request: Any) -> None:
                self.prepared = True

            async def write(self, data: Any) -> None:
                client.data += data
                client.largest = max(client.largest, len(data))

            async def write_eof(self, data: bytes = b"") -> None:
                pass

        async def whole(request: Any, response: web.Response, stall_s: float) -> web.Response:
            assert isinstance(response.body, bytes)
            client.data, client.is_whole = bytearray(response.body), True
            return response

        monkeypatch.setattr("specdec.server.streams.web.StreamResponse", Response)
        monkeypatch.setattr("specdec.server.streams.send_whole", whole)

    def read(self, pieces: Iterator[str], *, is_long: bool) -> Any:
        request: Any = SimpleNamespace(transport=None)
        asyncio.run(send_pieces(request, pieces, 5.0, asyncio.to_thread if is_long else None))
        return json.loads(self.data)


@pytest.mark.parametrize(("tokens", "beside"), [(1, False), (LONG // 20, True)])
def test_long_answers_are_serialised_in_chunks_in_threads(
    tokens: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form: Any = Watched()
    body: Any = SimpleNamespace(return_metrics=True)
    prepared: Any = [SimpleNamespace(params=SimpleNamespace(n=CHOICES), ids=(1,))]
    writer = Chunks(form, body, 'a "model"', prepared)
    parts: Any = told(tokens), writer, SimpleNamespace(said=lambda own: None)
    said, client = asyncio.run(generate._gather(*parts)), Client(monkeypatch)
    whole = client.read(writer.whole(said), is_long=beside)
    assert {thread is not threading.main_thread() for thread in form.threads} == {beside}
    assert client.is_whole != beside
    assert not beside or client.largest < 2 * AT_A_TIME < len(client.data)
    assert list(whole) == ["id", "object", "created", "model", "choices", "usage", "metrics"]
    assert whole["object"] == "text_completion" and whole["model"] == 'a "model"'
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert all(len(choice["prompt_logprobs"]) == 1 + tokens for choice in whole["choices"])


@pytest.mark.parametrize("length", [0, 1, 64, 65])
def test_chunks_equal_json_dumps(length: int) -> None:
    for rows in (LazyJsonList(range(length), str), list(range(length))):
        value = {"a": {"b": rows, 'c"': "d"}, "e": [{"f": None}], "g": {}}
        assert "".join(written(value)) == json.dumps(value, default=list)


def token_of(n: int) -> Delta:
    top = TopTokens(array("i", range(20)).tobytes() + bytes(4 * 20), 20)
    piece, logprob = TextPiece("ab\r\n", n % 3), TokenLogprob(n, -0.1, top)
    return Delta("ab\r\n", (n,), logprobs=(logprob,), origins=(n % 3,), pieces=(piece,))


@pytest.mark.parametrize("count", [1, 2, 16, 17, 100])
def test_columns_round_trip(count: int) -> None:
    gathered, deltas = CollectedOutput(), [token_of(n) for n in range(count)]
    for delta in deltas:
        gathered.add(delta)
    for _ in range(2):
        whole = gathered.delta()
        for name in ("token_ids", "logprobs", "origins", "pieces"):
            assert getattr(whole, name) == tuple(x for delta in deltas for x in getattr(delta, name))
        assert whole.text == "ab\r\n" * count


def test_a_token_with_20_alternatives_takes_little_memory() -> None:
    """As number tuples a waiting token takes 2.5 KB; dictionaries of a whole choice take 8 KB more."""
    tokens, form = 4000, CompletionFormat(None, ShownFields(), n=1)
    tracemalloc.start()
    try:
        gathered = CollectedOutput()
        for n in range(tokens):
            gathered.add(token_of(n))
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        size = sum(map(len, written(form.said(0, gathered.delta()))))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 200 * tokens
    assert kept < 600 * tokens
    assert peak < 1500 * tokens


def prepared_of(length: int, **params: Any) -> list[PreparedPrompt]:
    return [PreparedPrompt((1,) * length, ValidatedParams(SamplingParams(**params)))]


def test_an_answer_of_more_values_than_the_server_allows_is_refused_by_the_field_that_makes_it() -> None:
    for params, size, field in (
        ({"n": 4, "max_tokens": 100, "logprobs": 9}, 4 * 100 * 10, "max_tokens"),
        ({"n": 4, "max_tokens": 100}, 4 * 100, "max_tokens"),
        ({"max_tokens": 9999}, 990, "max_tokens"),
        ({"n": 2, "max_tokens": 1, "prompt_logprobs": 4}, 2 * (1 + 10 * 5), "prompt_logprobs"),
        ({"max_tokens": 10, "trees": True}, 10 * 65, "max_tokens"),
    ):
        prepared = prepared_of(10, **params)
        check_size(prepared, 1000, size, top="top_logprobs")
        with pytest.raises(Failure) as told:
            check_size(prepared, 1000, size - 1, top="top_logprobs")
        assert told.value.status == 400 and told.value.param == field
        for name in (f"{size:,}", f"{size - 1:,}", "n times max_tokens", "top_logprobs", "max_answer_values"):
            assert name in str(told.value)
