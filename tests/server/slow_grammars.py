"""Grammar processes that hang in a grammar when told to: see `faulty`."""

import os
import time
from pathlib import Path

from specdec.text.grammar import child
from tests.server.faulty import FILE, told


def set_slow() -> None:
    right = child.to_llguidance

    def wrong(kind: str, source: str) -> str:
        if told("compiled", Path(os.environ[FILE])):
            time.sleep(1000)
        return right(kind, source)

    child.to_llguidance = wrong


if __name__ == "__main__":
    set_slow()
    child.main()
