"""xgrammar processes that hang in a grammar when told to: see `faulty`."""

import os
import time
from pathlib import Path
from typing import Any

from specdec.text.grammar import child
from tests.server.faulty import FILE, told


def set_slow() -> None:
    right = child.compiled_form

    def wrong(compiler: Any, kind: str, source: str) -> Any:
        if told("compiled", Path(os.environ[FILE])):
            time.sleep(1000)
        return right(compiler, kind, source)

    child.compiled_form = wrong


if __name__ == "__main__":
    set_slow()
    child.main()
