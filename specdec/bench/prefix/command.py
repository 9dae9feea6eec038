"""The prefix benchmark's command line."""

import argparse
from pathlib import Path

from specdec.bench.prefix.generate import KINDS, generate
from specdec.bench.prefix.traces import Trace, read_trace, write_trace
from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.options import add_settings, at_least, listed, one_of, settings_from

ABOUT = """\
Without --engine, no model is run: traces of requests are played to caches of several sizes, and what each
would have found is counted. The caches have the memory of requests that live too. With --engine, requests go
to two engines over a checkpoint, one that keeps prefixes and one that does not, in turn, and first tokens are
timed. With --out a simulation that was cut short goes on where it ended when it is repeated."""
POLICIES = ("none", "vLLM+", "LRU", "tuned", "best")
SIZES = ("5GB", "10GB", "20GB", "40GB")
"""Of the default shape, and of traces of the default length, all are contended."""
MEASURED = {"prefix_cache", "seed"}
"""Settings of an engine that the benchmark sets itself."""


def add_prefix(parser: argparse.ArgumentParser) -> None:
    """Add the options of the prefix benchmark."""
    parser.set_defaults(command=_prefix)
    parser.description, parser.formatter_class = ABOUT, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--trace", metavar="NAMES", type=listed(one_of(*KINDS)), help=f"{', '.join(KINDS)} (default: all)")
    add("--file", metavar="FILE", type=Path, help="a trace of your own, JSON lines as Marconi's are")
    add("--sessions", metavar="COUNT", type=at_least(1), help="of each trace that is generated")
    add("--seed", metavar="SEED", type=at_least(0), default=0, help="of what is generated (default: 0)")
    add("--write", metavar="FOLDER", type=Path, help="write the traces there, and do nothing else")
    add("--out", metavar="FOLDER", type=Path, help="keep measurements, results and pictures there")
    own = parser.add_argument_group("simulation").add_argument
    own("--shape", default="nemotron-h-8b", help="a named size (default: nemotron-h-8b)")
    own(
        "--memory", metavar="BYTES", type=listed(str), default=list(SIZES), help=f"default: {','.join(SIZES)}"
    )
    own("--policy", metavar="NAMES", type=listed(one_of(*POLICIES)), help=f"default: {','.join(POLICIES)}")
    own("--alive", metavar="REQUESTS", type=at_least(1), default=16, help="at a time (default: 16)")
    add("--engine", metavar="MODEL", type=Path, help="a checkpoint's folder, or tiny")
    timed = parser.add_argument_group("with --engine").add_argument
    timed("--requests", metavar="COUNT", type=at_least(1), default=64, help="of a trace (default: 64)")
    timed("--together", metavar="COUNT", type=at_least(1), default=1, help="at a time (default: 1)")
    timed("--max-tokens", metavar="TOKENS", type=at_least(1), default=8, help="of an answer (default: 8)")
    add_settings(parser, EngineConfig, title="engine", without={*MEASURED, "memory_bytes"})


def _prefix(args: argparse.Namespace) -> None:
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"--out: {args.out} is a file; name a folder", field="out")
    if args.engine is not None:
        return _engine(args)
    traces = [read_trace(args.file)] if args.file else []
    names = args.trace or ([] if args.file else list(KINDS))
    traces += [generate(name, args.seed, sessions=args.sessions) for name in names]
    if args.write:
        return _write(traces, args.write)
    from specdec.bench.prefix.run import Options, run
    from specdec.bench.prefix.simulate import Speeds

    options = Options(
        traces=traces,
        shape=args.shape,
        memory=[_bytes(text) for text in args.memory],
        policies=args.policy or POLICIES,
        speeds=Speeds(most_alive=args.alive),
        seed=args.seed,
        arguments=_arguments(args),
    )
    run(options, args.out)


def _engine(args: argparse.Namespace) -> None:
    from specdec.bench.prefix.engine import Options, run

    if args.file or args.write:
        raise ConfigError("--engine: its traces are generated; leave --file and --write out", field="engine")
    options = Options(
        model=args.engine,
        names=args.trace or ["system-prompts"],
        requests=args.requests,
        together=args.together,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    given = {name: value for name, value in vars(args).items() if name not in MEASURED}
    run(options, settings_from(argparse.Namespace(**given), EngineConfig), args.out)


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
    size = EngineConfig.model_validate({"memory_bytes": text}).memory_bytes
    assert size is not None
    return size
