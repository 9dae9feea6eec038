"""The benchmarks' command lines. A benchmark is imported when it runs, as it needs torch."""

import argparse
import math
import re
from functools import partial
from pathlib import Path

from specdec.bench.acceptance.prompts import choose
from specdec.bench.options import (
    LLAMA_CPP,
    ModelOptions,
    PrefixOptions,
    ReachOptions,
    ServeOptions,
    ThroughputOptions,
)
from specdec.bench.report import ReportOutput, add_json
from specdec.config.engine import EngineConfig
from specdec.config.options import Run, add_options, add_settings, secret, settings_from
from specdec.errors import ConfigError
from specdec.models.folder import GIVEN, find_models

PREFIX = """\
Requests that share prefixes go to two engines over a checkpoint, one that caches prefixes and one that does
not, in turn. First tokens are timed, and texts compared."""
MEASURED = {"prefix_cache", "seed"}
"""Engine settings that the prefix benchmark sets itself."""
LEAST_BANDWIDTH = 1e6
"""Bytes per second; a smaller value lacks its unit."""


def add_throughput(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specdec bench throughput`."""
    parser.set_defaults(command=_throughput)
    parser.add_argument("model", metavar="MODEL", nargs="?", help=GIVEN)
    add_options(parser, ThroughputOptions, without={"model", "seed"})
    add_out(parser)
    add_settings(parser, EngineConfig, title="engine")


def _throughput(args: argparse.Namespace) -> Run:
    options, config = settings_from(args, ThroughputOptions), settings_from(args, EngineConfig)
    if options.profile and not options.random:
        raise ConfigError("profile: it belongs to --random; give it too", field="random")
    if options.llama_server is not None and LLAMA_CPP not in options.peers:
        raise ConfigError(f"llama_server: it belongs to --peers {LLAMA_CPP}; give it too", field="peers")
    if options.model is not None and "shape" in options.model_fields_set:
        raise ConfigError("shape: a model is named too; measure either of them", field="shape")
    out = out_file(args)
    if options.model is not None:
        _, config = find_models(options.model, config)
    # Imported late: other commands do not need torch or the benchmark's packages.
    if options.random:
        from specdec.bench.random_run import run_random

        return partial(run_random, options, config, out)
    from specdec.bench.throughput import run

    return partial(run, options, config, out)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of the time model."""
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
    from specdec.bench.time_model import run

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


def add_prefix(parser: argparse.ArgumentParser) -> None:
    """Add the options of the prefix benchmark."""
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
    from specdec.bench.prefix.engine import run

    return partial(run, options, config, out)


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the options of the serving benchmark."""
    parser.set_defaults(command=_serve)
    parser.add_argument("url", metavar="URL", help="an OpenAI-style server, such as http://localhost:8000")
    add_options(parser, ServeOptions, without={"url"})
    add_out(parser)


def _serve(args: argparse.Namespace) -> Run:
    options, out = settings_from(args, ServeOptions), out_file(args)
    from specdec.bench.serve.run import run

    prompts = choose(options.prompts, options.category, options.limit)
    return partial(run, options, prompts, secret(options.api_key_env), out)


def add_reach(parser: argparse.ArgumentParser) -> None:
    """Add the options of the prefill/decode disaggregation benchmark."""
    parser.set_defaults(command=_reach)
    parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=GIVEN)
    add_options(parser, ReachOptions, without={"model", "seed"})
    add_out(parser)
    add_settings(parser, EngineConfig, title="engine")


def _reach(args: argparse.Namespace) -> Run:
    options, config = settings_from(args, ReachOptions), settings_from(args, EngineConfig)
    out = out_file(args)
    find_models(options.model, config)  # or refuse them
    from specdec.bench.reach.run import run

    return partial(run, options, config, out)


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the report there as JSON")
    add_json(parser)


def out_file(args: argparse.Namespace) -> ReportOutput:
    """Return the report's destination; refuse a bad one before measuring."""
    path: Path | None = args.out
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--out: {path} is no file in a folder that exists; name one", field="out")
    return ReportOutput(path, args.json)


def out_folder(args: argparse.Namespace) -> ReportOutput:
    """Return the folder for reports; refuse a file before measuring."""
    path: Path | None = args.out
    if path is not None and path.exists() and not path.is_dir():
        raise ConfigError(f"--out: {path} is a file; name a folder", field="out")
    return ReportOutput(path, args.json)
