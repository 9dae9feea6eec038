"""Other ways to start the command: `python -m specdec.cli`, and `server.py` at the root."""

import subprocess
import sys
from pathlib import Path

from specdec import __version__

ROOT = Path(__file__).parents[2]


def ran(*words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_cli_runs_as_the_command() -> None:
    assert ran("-m", "specdec.cli", "--version") == (0, f"specdec {__version__}\n", "")


def test_server_at_the_root_is_serve() -> None:
    code, helped, said = ran("server.py", "--help")
    assert (code, said) == (0, "") and helped.startswith("usage: specdec serve ")
    assert ran("-m", "specdec", "serve", "--help") == (0, helped, "")
    code, said, why = ran("-S", "server.py", "tiny")  # with a Python that has no packages
    assert (code, said) == (1, "") and "torch" in why and "`make serve`" in why and "Traceback" not in why
