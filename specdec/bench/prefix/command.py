"""The prefix benchmark's command line."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specdec.bench.plots import require_matplotlib
from specdec.bench.prefix.generate import KINDS, generate
from specdec.bench.prefix.traces import Trace, read_trace, write_trace
from specdec.bench.report import Output, add_json
from specdec.config.base import MAX_BYTES, parse_bytes
from specdec.config.engine import EngineConfig
from specdec.config.options import Run, add_settings, at_least, listed, one_of, settings_from
from specdec.errors import ConfigError
from specdec.models.folder import GIVEN, find_models

ABOUT = """\
Without --engine, no model is run: traces of requests are played to caches of several sizes, and what each
would have found is counted. The caches have the memory of requests that live too. With --engine, requests go
to two engines over a checkpoint, one that keeps prefixes and one that does not, in turn, and first tokens are
timed. With --out a simulation that was cut short goes on where it ended when it is repeated."""
POLICIES = ("none", "vLLM+", "LRU", "tuned", "best")
SIZES = tuple(size * 10**9 for size in (5, 10, 20, 40))
"""Bytes. Of the default shape, and of traces of the default length, all are contended."""
MEASURED = {"prefix_cache", "seed"}
"""Settings of an engine that the benchmark sets itself."""
SIMULATED: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("file", "sessions", "write")),
        **{"shape": "nemotron-h-8b", "memory": SIZES, "policy": POLICIES, "alive": 16},
    }
)
"""Options without --engine, and what they are where they are not given."""
TIMED: Mapping[str, Any] = MappingProxyType({"requests": 64, "together": 1, "max_tokens": 8})
"""The same with --engine, whose settings are options beside them."""


def add_prefix(parser: argparse.ArgumentParser) -> None:
    """Add the options of the prefix benchmark."""
    parser.set_defaults(command=_prefix)
    parser.description, parser.formatter_class = ABOUT, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    traces = f"{', '.join(KINDS)} (default: all; with --engine: system-prompts)"
    add("--trace", metavar="NAMES", type=listed(one_of(*KINDS)), help=traces)
    add("--seed", metavar="SEED", type=at_least(0), default=0, help="of what is generated (default: 0)")
    add(
        "--out",
        metavar="FOLDER",
        type=Path,
        help="folder for measurements, results and plots (needs matplotlib)",
    )
    add_json(parser)
    add("--engine", metavar="MODEL", help=GIVEN)
    # Those of one mode leave no trace where they are not given, so that the other can refuse them.
    own = partial(parser.add_argument_group("simulation").add_argument, default=argparse.SUPPRESS)
    own("--file", metavar="FILE", type=Path, help="a trace of your own, JSON lines as Marconi's are")
    own("--sessions", metavar="COUNT", type=at_least(1), help="of each trace that is generated")
    own("--write", metavar="FOLDER", type=Path, help="write the traces there, and do nothing else")
    own("--shape", help=f"a named size (default: {SIMULATED['shape']})")
    sizes = ",".join(f"{size // 10**9}GB" for size in SIZES)
    own("--memory", metavar="BYTES", type=listed(_bytes), help=f"default: {sizes}")
    own("--policy", metavar="NAMES", type=listed(one_of(*POLICIES)), help=f"default: {','.join(POLICIES)}")
    alive = f"at a time (default: {SIMULATED['alive']})"
    own("--alive", metavar="REQUESTS", type=at_least(1), help=alive)
    timed = partial(parser.add_argument_group("with --engine").add_argument, default=argparse.SUPPRESS)
    for name, metavar, of in (
        ("requests", "COUNT", "of a trace"),
        ("together", "COUNT", "at a time"),
        ("max_tokens", "TOKENS", "of an answer"),
    ):
        says = f"{of} (default: {TIMED[name]})"
        timed(_option(name), metavar=metavar, type=at_least(1), help=says)
    add_settings(parser, EngineConfig, title="engine", without={*MEASURED, "memory_bytes"})


def _prefix(args: argparse.Namespace) -> Run:
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"--out: {args.out} is a file; name a folder", field="out")
    _settle(args)
    if args.engine is not None:
        return _engine(args)
    if args.out is not None:
        require_matplotlib()
    names = args.trace or ([] if args.file else list(KINDS))
    if args.file and args.file.stem in names:
        raise ConfigError(
            f"--file: {args.file} goes by the name of --trace {args.file.stem}; rename the file", field="file"
        )
    traces = [read_trace(args.file)] if args.file else []
    traces += [generate(name, args.seed, sessions=args.sessions) for name in names]
    if args.write:
        return partial(_write, traces, args.write)
    from specdec.bench.prefix.run import Options, run
    from specdec.bench.prefix.simulate import Speeds

    options = Options(
        traces=traces,
        shape=args.shape,
        memory=args.memory,
        policies=args.policy,
        speeds=Speeds(most_alive=args.alive),
        seed=args.seed,
        arguments=_arguments(args),
    )
    return partial(run, options, Output(args.out, args.json))


def _settle(args: argparse.Namespace) -> None:
    """Refuse what the mode has no use for; set what was not given, and what was said twice once."""
    given = vars(args)
    if args.engine is None:
        own, other, remedy = SIMULATED, {*TIMED, *EngineConfig.model_fields} - MEASURED, "give --engine too"
    else:
        own, other, remedy = TIMED, {*SIMULATED}, "leave --engine out"
    if unused := [name for name in given if name in other]:
        raise ConfigError(
            f"{_option(unused[0])}: it has no use {'with' if args.engine else 'without'} --engine; leave it "
            f"out, or {remedy}",
            field=unused[0],
        )
    given.update({**own, **given})
    for name, value in given.items():
        if name in ("trace", "memory", "policy") and value is not None:
            given[name] = list(dict.fromkeys(value))


def _engine(args: argparse.Namespace) -> Run:
    given = {name: value for name, value in vars(args).items() if name not in MEASURED}
    _, config = find_models(args.engine, settings_from(argparse.Namespace(**given), EngineConfig))
    from specdec.bench.prefix.engine import Options, run

    options = Options(
        model=args.engine,
        names=args.trace or ["system-prompts"],
        requests=args.requests,
        together=args.together,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    return partial(run, options, config, Output(args.out, args.json))


def _write(traces: list[Trace], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for trace in traces:
            path = folder / f"{trace.name}.jsonl"
            write_trace(trace, path)
            print(f"{path}: {len(trace.turns)} requests, {trace.tokens} tokens to read")
    except OSError as error:
        raise ConfigError(
            f"--write: {folder} cannot be written ({error.strerror}); name a folder", field="write"
        ) from error


def _arguments(args: argparse.Namespace) -> dict[str, object]:
    """Return what must be the same for measurements to belong to one run."""
    names = ("trace", "file", "sessions", "seed", "shape", "memory", "policy", "alive")
    found = {name: getattr(args, name) for name in names}
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def _bytes(text: str) -> int:
    size = parse_bytes(text)
    if not isinstance(size, int) or not 1 <= size <= MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes such as 5GB or 512MiB")
    return size


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
