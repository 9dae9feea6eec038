"""Work in threads that nothing waits for when the process ends."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def apart(work: Callable[[], T], name: str) -> T:
    """Do work that may never end, or take minutes, in a daemon thread; who is cancelled waits no longer."""
    doing: Future[T] = Future()
    doing.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done = work()
        except BaseException as error:
            doing.set_exception(error)
        else:
            doing.set_result(done)

    threading.Thread(target=run, name=f"specdec-{name}", daemon=True).start()
    return await asyncio.wrap_future(doing)
