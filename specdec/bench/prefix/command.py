"""The prefix benchmark's command line."""

import argparse
from functools import partial
from pathlib import Path

from specdec.bench.prefix.generate import KINDS
from specdec.bench.report import ReportOutput, add_json
from specdec.config.engine import EngineConfig
from specdec.config.options import Run, add_settings, at_least, listed, one_of, settings_from
from specdec.errors import ConfigError
from specdec.models.folder import GIVEN, find_models

ABOUT = """\
Requests that share prefixes go to two engines over a checkpoint, one that caches prefixes and one that does
not, in turn. First tokens are timed, and texts compared."""
MEASURED = {"prefix_cache", "seed"}
"""Engine settings that the benchmark sets itself."""


def add_prefix(parser: argparse.ArgumentParser) -> None:
    """Add the options of the prefix benchmark."""
    parser.set_defaults(command=_prefix)
    parser.description, parser.formatter_class = ABOUT, argparse.RawDescriptionHelpFormatter
    add, count = parser.add_argument, at_least(1)
    add("model", metavar="MODEL", help=GIVEN)
    kinds = f"{', '.join(KINDS)} (default: system-prompts)"
    add("--trace", metavar="NAMES", type=listed(one_of(*KINDS)), default=["system-prompts"], help=kinds)
    add("--seed", metavar="SEED", type=at_least(0), default=0, help="of the requests (default: 0)")
    add("--requests", metavar="COUNT", type=count, default=64, help="requests of each trace (default: 64)")
    add("--together", metavar="COUNT", type=count, default=1, help="concurrent requests (default: 1)")
    add(
        "--max-tokens",
        metavar="TOKENS",
        type=count,
        default=8,
        help="max_tokens of each request (default: 8)",
    )
    add("--out", metavar="FOLDER", type=Path, help="folder for the report, prefix-engine.json")
    add_json(parser)
    add_settings(parser, EngineConfig, title="engine", without=MEASURED)


def _prefix(args: argparse.Namespace) -> Run:
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"--out: {args.out} is a file; name a folder", field="out")
    given = {name: value for name, value in vars(args).items() if name not in MEASURED}
    _, config = find_models(args.model, settings_from(argparse.Namespace(**given), EngineConfig))
    # Imported late: other commands do not need torch or the benchmark's packages.
    from specdec.bench.prefix.engine import PrefixBenchOptions, run

    options = PrefixBenchOptions(
        model=args.model,
        names=list(dict.fromkeys(args.trace)),
        requests=args.requests,
        together=args.together,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    return partial(run, options, config, ReportOutput(args.out, args.json))
