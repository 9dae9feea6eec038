"""The command line: `python -m tools.kernels`."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import tools.kernels
from specdec.bench.commands import add_out, out_file
from specdec.cli import run_command
from specdec.config.engine import EngineConfig
from specdec.config.options import Run, add_options, settings_from
from specdec.config.parser import Parser
from tools.kernels.bench import run
from tools.kernels.options import KernelOptions


def parser() -> Parser:
    """Return the argument parser."""
    made = Parser(prog="python -m tools.kernels", description=tools.kernels.__doc__)
    made.set_defaults(command=_command, verbose=False)
    add_options(made, KernelOptions)
    add_out(made)
    return made


def _command(args: argparse.Namespace) -> Run:
    options, out = settings_from(args, KernelOptions), out_file(args)
    EngineConfig.model_validate(options.model_dump(include={"device", "kernels", "dtype"}))
    return partial(run, options, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 2 if the options are refused, 130 after Ctrl-C."""
    return run_command(parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
