"""What a server that is no peer answers is bounded before it is parsed."""

import asyncio
from typing import ClassVar

import pytest

from specdec.reach.allowed import Endpoint
from specdec.reach.calls import MOST_ANSWER_BYTES, Calls
from specdec.reach.messages import Closed
from specdec.reach.terms import Refusal, Secret


class Recorded(Closed):
    """Records how many bytes were parsed."""

    parsed: ClassVar[list[int]] = []

    @classmethod
    def from_json(cls, data: bytes) -> "Recorded":
        cls.parsed.append(len(data))
        return cls(intact=True)


async def answered(num_bytes: int) -> Recorded:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % num_bytes + b"[" * num_bytes)
        writer.close()

    calls = Calls(Secret("a-secret-of-the-tests"))
    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as server:
        try:
            at = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
            return await calls.get(at, "/reach/agents", Recorded)
        finally:
            await calls.close()


def test_an_answer_that_is_too_long_is_not_parsed() -> None:
    Recorded.parsed.clear()
    assert asyncio.run(answered(MOST_ANSWER_BYTES)).intact
    assert Recorded.parsed == [MOST_ANSWER_BYTES], "the control"
    with pytest.raises(Refusal) as caught:
        asyncio.run(answered(MOST_ANSWER_BYTES + 1))
    assert caught.value.reason == "garbled" and len(Recorded.parsed) == 1
