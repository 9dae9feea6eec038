"""The command line: `python -m tools.bench`. A benchmark is imported when it runs, as it needs torch."""

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import tools.bench
from specdec.bench.commands import add_out, out_file, out_folder
from specdec.bench.report import add_json
from specdec.cli import run_command
from specdec.config.engine import EngineConfig
from specdec.config.options import Run, add_options, add_settings, settings_from
from specdec.config.parser import Parser
from specdec.errors import ConfigError
from specdec.models.folder import GIVEN, find_models
from tools.bench.options import ModelOptions, PrefixOptions, RandomOptions, ReachOptions

PREFIX = """\
Requests that share prefixes go to two engines over a checkpoint, one that caches prefixes and one that does
not, in turn. First tokens are timed, and outputs compared."""
MEASURED = {"prefix_cache", "seed"}
"""Engine settings that the prefix benchmark sets itself."""
LEAST_BANDWIDTH = 1e6
"""Bytes per second; a smaller value lacks its unit."""


def parser() -> Parser:
    """Return the argument parser."""
    made = Parser(prog="python -m tools.bench", description=tools.bench.__doc__)
    made.set_defaults(verbose=False)
    chosen = made.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    for name, (help_text, add) in BENCHMARKS.items():
        chosen.add_parser(name, help=help_text, fill=add)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; return 2 if the options are refused, 130 after Ctrl-C."""
    return run_command(parser(), argv)


def _add_random(parser: argparse.ArgumentParser) -> None:
    """Add the options of `random`."""
    parser.set_defaults(command=_random)
    add_options(parser, RandomOptions, without={"seed"})
    add_out(parser)
    add_settings(parser, EngineConfig, title="engine")


def _random(args: argparse.Namespace) -> Run:
    options, config = settings_from(args, RandomOptions), settings_from(args, EngineConfig)
    from tools.bench.random_run import run

    return partial(run, options, config, out_file(args))


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of `model`."""
    parser.set_defaults(command=_model)
    add_options(parser, ModelOptions)
    add_out(parser)


def _model(args: argparse.Namespace) -> Run:
    options, out = settings_from(args, ModelOptions), out_file(args)
    if options.acceptance > options.window:
        raise ConfigError(
            f"--acceptance: a step with a window of {options.window} gains from 1 to {options.window} "
            f"tokens, not {options.acceptance:g}; give a length in between, or another --window",
            field="acceptance",
        )
    bandwidth = _speed(options.bandwidth)
    from tools.bench.time_model import run

    return partial(run, options, bandwidth, out)


def _speed(text: str) -> float:
    """Parse bytes per second, with or without a unit."""
    found = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]?)(?:b(?:/s)?)?\s*", text, re.IGNORECASE)
    try:
        speed = float(found[1]) * 1000 ** " kmgt".index(found[2].lower() or " ") if found else math.nan
    except ValueError:  # two decimal points
        speed = math.nan
    if not LEAST_BANDWIDTH <= speed < math.inf:
        raise ConfigError(
            f"--bandwidth: {text!r} is no speed of a memory; give bytes per second, such as 4.3e12 or 4.3TB",
            field="bandwidth",
        )
    return speed


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    """Add the options of `prefix`."""
    parser.set_defaults(command=_prefix)
    parser.description, parser.formatter_class = PREFIX, argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", metavar="MODEL", help=GIVEN)
    add_options(parser, PrefixOptions, without={"model"})
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="folder for the report, prefix-engine.json"
    )
    add_json(parser)
    add_settings(parser, EngineConfig, title="engine", without=MEASURED)


def _prefix(args: argparse.Namespace) -> Run:
    options, out = settings_from(args, PrefixOptions), out_folder(args)
    given = {name: value for name, value in vars(args).items() if name not in MEASURED}
    _, config = find_models(options.model, settings_from(argparse.Namespace(**given), EngineConfig))
    from tools.bench.prefix.engine import run

    return partial(run, options, config, out)


def _add_reach(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reach`."""
    parser.set_defaults(command=_reach)
    parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=GIVEN)
    add_options(parser, ReachOptions, without={"model", "seed"})
    add_out(parser)
    add_settings(parser, EngineConfig, title="engine")


def _reach(args: argparse.Namespace) -> Run:
    options, config = settings_from(args, ReachOptions), settings_from(args, EngineConfig)
    out = out_file(args)
    find_models(options.model, config)  # or refuse them
    from tools.bench.reach.run import run

    return partial(run, options, config, out)


BENCHMARKS: Mapping[str, tuple[str, Callable[[Parser], None]]] = {
    "model": ("compute the bytes of a step and the speed they allow", _add_model),
    "prefix": ("time to first token with and without the prefix cache", _add_prefix),
    "random": ("decode speed of named sizes, with weights drawn on the device", _add_random),
    "reach": ("disaggregated prefill: transfers, TTFT and TPOT", _add_reach),
}

if __name__ == "__main__":
    sys.exit(main())
