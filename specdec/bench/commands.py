"""The benchmarks' command lines. A benchmark itself is imported when it runs, for it brings torch along."""

import argparse
import math
import os
import re
from functools import partial
from pathlib import Path

from specdec.bench.acceptance.prompts import choose
from specdec.config.engine import EngineConfig
from specdec.config.options import Run, at_least, listed
from specdec.errors import ConfigError


def add_random(parser: argparse.ArgumentParser) -> None:
    """Add what the throughput benchmark knows of models that no checkpoint holds."""
    add = parser.add_argument
    add("--random", action="store_true", help="draw the weights of --shape on the device; nothing is written")
    add("--fp8", action="store_true", help="the same as --quantize fp8")
    add("--profile", action="store_true", help="with --random: time by kernel, and how long it waits")


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark of single operations."""
    parser.set_defaults(command=_kernels)
    add, counts = parser.add_argument, listed(at_least(1))
    add(
        "--shape",
        metavar="NAME",
        type=listed(str),
        help="named sizes (default: two real ones, tiny on a CPU)",
    )
    add("--batch", metavar="ROWS", type=counts, help="(default: 1,64, with 16,256 to verify; 1,4 on a CPU)")
    add("--window", metavar="TOKENS", type=counts, help="(default: 1,8, with 4,16 to verify)")
    add("--context", metavar="TOKENS", type=at_least(1), help="tokens before a window (default: 1024; 64)")
    add("--only", metavar="OPERATION", type=listed(str), help="measure these alone; peers names all of those")
    add("--repeats", metavar="TIMES", type=at_least(1), default=20, help="(default: 20)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:<number> (default: auto)")
    add("--kernels", default="auto", help="auto, reference, cpu, native or triton (default: auto)")
    add("--dtype", default="auto", help="bfloat16 on a GPU, float32 on a CPU (default: auto)")
    add("--peers", action=argparse.BooleanOptionalAction, default=True, help="beside other packages")
    add_out(parser)


def _kernels(args: argparse.Namespace) -> Run:
    from specdec.bench.kernels import Options, run

    out = out_file(args)
    settings = EngineConfig(device=args.device, kernels=args.kernels, dtype=args.dtype)
    options = Options(
        device=settings.device,
        kernels=settings.kernels,
        dtype=settings.dtype,
        shapes=args.shape,
        batches=args.batch,
        windows=args.window,
        only=args.only,
        context=args.context,
        repeats=args.repeats,
        peers=args.peers,
    )
    return partial(run, options, out)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of the time model."""
    parser.set_defaults(command=_model)
    add = parser.add_argument
    add("--shape", default="qwen3-next-80b-a3b", help="a named size (default: qwen3-next-80b-a3b)")
    add("--fp8", action="store_true", help="the layers' matrices take a byte an entry")
    add("--batch", metavar="ROWS", type=at_least(1), default=1, help="(default: 1)")
    add("--window", metavar="TOKENS", type=at_least(1), default=4, help="tokens verified a row (default: 4)")
    add("--context", metavar="TOKENS", type=at_least(0), default=0, help="tokens before it (default: 0)")
    add("--acceptance", metavar="LENGTH", type=float, default=1.0, help="tokens gained a step (default: 1)")
    add("--draft-steps", metavar="STEPS", type=at_least(0), help="passes of the head (default: window - 1)")
    add("--draft-topk", metavar="TOKENS", type=at_least(1), default=1, help="tokens a pass (default: 1)")
    add("--slots", choices=("record", "snapshot"), default="record", help="(default: record)")
    add("--bandwidth", metavar="BYTES/S", default="4.3TB", help="(default: 4.3TB, an H200's)")
    add_out(parser)


def _model(args: argparse.Namespace) -> Run:
    from specdec.bench.random_model import shape_config
    from specdec.bench.report import publish
    from specdec.bench.time_model import Work, describe, render
    from specdec.models.families import network

    out = out_file(args)
    if not 1 <= args.acceptance <= args.window:
        raise ConfigError(
            f"--acceptance: a step with a window of {args.window} gains from 1 to {args.window} tokens, not "
            f"{args.acceptance:g}; give a length in between, or another --window",
            field="acceptance",
        )
    bandwidth = _speed(args.bandwidth)
    shape = network(shape_config(args.shape))
    default_steps = args.window - 1 if shape.mtp else 0
    work = Work(
        rows=args.batch,
        window=args.window,
        context=args.context,
        accepted=args.acceptance,
        draft_steps=default_steps if args.draft_steps is None else args.draft_steps,
        topk=args.draft_topk,
        fp8=args.fp8,
        slots=args.slots,
    )
    report = {"shape": args.shape, **describe(shape, work, bandwidth)}
    return partial(publish, render(report), report, out)


def _speed(text: str) -> float:
    """Read bytes per second, with a unit or without."""
    found = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]?)(?:b(?:/s)?)?\s*", text, re.IGNORECASE)
    try:
        speed = float(found[1]) * 1000 ** " kmgt".index(found[2].lower() or " ") if found else math.nan
    except ValueError:  # of two points
        speed = math.nan
    if not 0 < speed < math.inf:
        raise ConfigError(
            f"--bandwidth: {text!r} is no speed above 0; give bytes per second, such as 4.3e12 or 4.3TB",
            field="bandwidth",
        )
    return speed


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark of servers."""
    parser.set_defaults(command=_serve)
    add, counts = parser.add_argument, listed(at_least(1))
    add("url", metavar="URL", help="an OpenAI-style server, such as http://localhost:8000")
    add("--model", metavar="NAME", help="(default: the first that the server names)")
    add("--chat", action="store_true", help="/v1/chat/completions, with the server's own template")
    add_prompts(parser)
    add("--concurrency", metavar="REQUESTS", type=counts, default=[1, 4, 16], help="(default: 1,4,16)")
    add("--requests", metavar="COUNT", type=at_least(1), help="at each (default: 4 a place, 16 at least)")
    add("--rate", metavar="PER SECOND", type=above_0, help="arrivals by chance, at most CONCURRENCY at once")
    add("--max-tokens", metavar="TOKENS", type=at_least(1), default=128, help="(default: 128)")
    add("--temperature", type=_number, default=0.0, help="(default: 0)")
    add("--ignore-eos", action="store_true", help="ask for answers of full length")
    add("--seed", type=at_least(0), default=0, help="of prompts' order, arrivals, sampling (default: 0)")
    add("--api-key-env", metavar="NAME", help="the environment variable that holds the key")
    add("--warmup", metavar="REQUESTS", type=at_least(0), help="before each, uncounted (default: as many)")
    add("--timeout", metavar="SECONDS", type=above_0, default=600.0, help="of a request (default: 600)")
    add_out(parser)


def _serve(args: argparse.Namespace) -> Run:
    from specdec.bench.serve.run import Options, run

    out = out_file(args)
    options = Options(
        url=args.url,
        model=args.model,
        chat=args.chat,
        prompts=choose(args.prompts, args.category, args.limit),
        source=str(args.prompts or "the package"),
        concurrency=args.concurrency,
        requests=args.requests,
        rate=args.rate,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        seed=args.seed,
        api_key=secret(args.api_key_env),
        warmup=args.warmup,
        timeout_s=args.timeout,
    )
    return partial(run, options, out)


def secret(name: str | None) -> str | None:
    """Read a key from the environment: on the command line every user of the machine could see it."""
    if name is not None and name not in os.environ:
        raise ConfigError(f"--api-key-env: no variable {name!r} is set; export it first", field="api_key_env")
    return None if name is None else os.environ[name]


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return number


def above_0(text: str) -> float:
    if not (number := _number(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return number


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose prompts, for `choose`."""
    add, names = parser.add_argument, listed(str)
    add("--prompts", metavar="FILE", type=Path, help="JSON lines, or .txt (default: the sets that ship)")
    add("--category", metavar="NAME", type=names, default=[], help="of these alone, with commas")
    add("--limit", metavar="PROMPTS", type=at_least(1), help="at most so many of each category")


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the JSON line there too")


def out_file(args: argparse.Namespace) -> Path | None:
    """Return where the report is to go, before anything is measured for it."""
    path: Path | None = args.out
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--out: {path} is no file in a folder that exists; name one", field="out")
    return path
