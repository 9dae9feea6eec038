"""The benchmarks' command lines. A benchmark is imported when it runs, as it needs torch."""

import argparse
from functools import partial
from pathlib import Path

from specdec.bench.acceptance.prompts import choose
from specdec.bench.options import LLAMA_CPP, ServeOptions, ThroughputOptions
from specdec.bench.report import ReportOutput, add_json
from specdec.config.engine import EngineConfig
from specdec.config.options import Run, add_options, add_settings, secret, settings_from
from specdec.errors import ConfigError
from specdec.models.folder import GIVEN, find_models


def add_throughput(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specdec bench throughput`."""
    parser.set_defaults(command=_throughput)
    parser.add_argument("model", metavar="MODEL", nargs="?", help=GIVEN)
    add_options(parser, ThroughputOptions, without={"model", "seed"})
    add_out(parser)
    add_settings(parser, EngineConfig, title="engine")


def _throughput(args: argparse.Namespace) -> Run:
    options, config = settings_from(args, ThroughputOptions), settings_from(args, EngineConfig)
    if options.llama_server is not None and LLAMA_CPP not in options.peers:
        raise ConfigError(f"llama_server: it belongs to --peers {LLAMA_CPP}; give it too", field="peers")
    if options.model is not None and "shape" in options.model_fields_set:
        raise ConfigError("shape: a model is named too; measure either of them", field="shape")
    out = out_file(args)
    if options.model is not None:
        _, config = find_models(options.model, config)
    # Imported late: other commands do not need torch or the benchmark's packages.
    from specdec.bench.throughput import run

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
