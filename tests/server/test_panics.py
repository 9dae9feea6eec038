"""A tokenizer that panics in Rust, with an error that is no `Exception`: each request is answered."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.models.folder import SHIPPED
from specdec.server.failures import ENDS, Panic, without_panics
from specdec.server.state import LONG
from tests.server.live import Live

SPLIT = {"type": "Split", "pattern": {"Regex": "(q+)+z"}, "behavior": "Isolated", "invert": False}
"""A regex that backtracks until its library gives up."""
BAD = "q" * 60 + "!"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("panics") / "tiny"
    shutil.copytree(SHIPPED["tiny"], folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [SPLIT, tokenizer["pre_tokenizer"]]}
    path.write_text(json.dumps(tokenizer), "utf-8")
    with Live("--draft", "none", model=str(folder)) as own:
        yield own
        own.stop()


@pytest.mark.parametrize("more", ["", " x" * LONG], ids=["on the event loop", "in a thread"])
@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        ("/v1/completions", "prompt", {}),
        ("/v1/completions", "prompt", {"stream": True}),
        ("/v1/chat/completions", "messages", {}),
        ("/v1/messages", "messages", {"max_tokens": 1}),
        ("/tokenize", "prompt", {}),
    ],
)
def test_a_text_on_which_the_tokenizer_panics_is_refused(
    live: Live, path: str, field: str, fields: dict[str, Any], more: str
) -> None:
    text = BAD + more
    given: Any = [{"role": "user", "content": text}] if field == "messages" else text
    answer = live.ask(path, {field: given, **fields})
    assert answer.status == 400
    assert "the model's tokenizer fails on this text" in answer.json["error"]["message"]
    assert live.ask("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200


class Broken(BaseException):
    """Like the exception of a Rust panic."""


@pytest.mark.parametrize("kind", [*ENDS, ValueError])
def test_exceptions_that_end_a_task_are_not_panics(kind: type[BaseException]) -> None:
    with pytest.raises(kind), without_panics():
        raise kind
    with pytest.raises(Panic, match="Broken: why"), without_panics():
        raise Broken("why")


def test_a_cancelled_task_is_cancelled() -> None:
    async def wait() -> None:
        with without_panics():
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
