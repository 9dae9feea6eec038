"""The command line: `python -m tools.kernels`."""

import argparse
import sys
from collections.abc import Sequence

import tools.kernels
from specdec.bench.commands import add_out, out_file
from specdec.config.engine import EngineConfig
from specdec.config.options import add_options, settings_from
from specdec.errors import SpecdecError
from tools.kernels.bench import run
from tools.kernels.options import KernelOptions

USER_ERROR, INTERRUPTED = 2, 130


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    made = argparse.ArgumentParser(prog="python -m tools.kernels", description=tools.kernels.__doc__)
    add_options(made, KernelOptions)
    add_out(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 2 if the options are refused, 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        options, out = settings_from(args, KernelOptions), out_file(args)
        EngineConfig.model_validate(options.model_dump(include={"device", "kernels", "dtype"}))
        run(options, out)
    except SpecdecError as error:
        print(f"specdec: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
