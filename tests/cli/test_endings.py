"""How commands end: output is written or reported as lost, and resources are cleaned up."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import only

ROOT = Path(__file__).parents[2]
TINY = ["generate", "tiny", "--prompt", "def f():", "--max-tokens", "4"]


def shell(line: str) -> "subprocess.CompletedProcess[str]":
    """Run a line of bash in which `specdec` is the command; a pipe's exit code is the command's."""
    line = f'specdec() {{ "{sys.executable}" -m specdec "$@"; }}; {line}; exit ${{PIPESTATUS[0]}}'
    return subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("argv", ["--version", "--help", "generate --help-all", shlex.join(TINY)])
@pytest.mark.parametrize("unbuffered", only({""}, ["", "1"]))
def test_unwritable_output_is_reported_in_one_line(argv: str, unbuffered: str) -> None:
    ran = shell(f"export PYTHONUNBUFFERED={unbuffered}; specdec {argv} >/dev/full")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        "specdec: the output cannot be written (No space left on device); make room, or write elsewhere"
    )
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr


@pytest.mark.parametrize(
    "argv", only({"--version"}, ["--version", "generate --help-all", shlex.join([*TINY, "--json"])])
)
def test_a_closed_pipe_ends_any_command_quietly(argv: str) -> None:
    ran = shell(f"{{ sleep 0.2; specdec {argv}; }} | true")
    assert ran.returncode == 141 and "Traceback" not in ran.stderr and "Exception" not in ran.stderr


@pytest.mark.parametrize("argv", only({"--version"}, ["--version", "--help", shlex.join(TINY)]))
def test_a_reader_of_one_line_is_enough(argv: str) -> None:
    ran = shell(f"specdec {argv} | head -1")
    assert ran.returncode in (0, 141) and ran.stdout.count("\n") == 1
    assert "Traceback" not in ran.stderr and "Exception" not in ran.stderr


@pytest.mark.parametrize("argv", only({"--version"}, ["--version", shlex.join(TINY)]))
def test_without_an_output_nothing_is_written(argv: str) -> None:
    ran = shell(f"specdec {argv} >&-")
    assert ran.returncode == 0 and "Traceback" not in ran.stderr


ENDS = """
import atexit, sys
from specdec import __main__, cli

def main(on_start):
    atexit.register(print, "cleared up")
    {body}

cli.main = main
__main__.main()
"""


@pytest.mark.parametrize(
    ("body", "code", "out", "err"),
    [
        ("return 0", 0, "cleared up\n", ""),
        ("return 2", 2, "cleared up\n", ""),
        ("sys.exit()", 0, "cleared up\n", ""),
        ("sys.exit(3)", 3, "cleared up\n", ""),
        ("sys.exit('too bad')", 1, "cleared up\n", "too bad\n"),
        ("return 130", 130, "", ""),
        ("raise KeyboardInterrupt", 130, "", ""),
    ],
)
def test_a_command_ends_as_any_other_unless_it_was_interrupted(
    body: str, code: int, out: str, err: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ENDS.format(body=body)], cwd=ROOT, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, out, err)
