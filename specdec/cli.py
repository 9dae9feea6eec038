"""The `specdec` command. What a user gets wrong is one line and exit code 2."""

import argparse
import json
import logging
import os
import re
import reprlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from specdec import EngineConfig, SamplingParams, SpecEngine, __version__
from specdec.bench.acceptance.command import add_acceptance
from specdec.bench.commands import (
    above_0,
    add_kernels,
    add_model,
    add_out,
    add_random,
    add_serve,
    out_file,
    secret,
)
from specdec.bench.prefix.command import add_prefix
from specdec.demo import demo
from specdec.errors import ConfigError, RequestError, SpecdecError
from specdec.footprint import describe_model
from specdec.options import add_settings, at_least, listed, settings_from
from specdec.server.command import add_server
from specdec.terminal import COLOURS, binary, print_choices, stream_text
from specdec.train.commands import add_train

USER_ERROR, INTERRUPTED, READER_GONE = 2, 130, 141
SYNTHETIC = (
    "SYNTHETIC ACCEPTANCE: drafts are taken at given rates, whatever they say; this text is no model's"
)


class Parser(argparse.ArgumentParser):
    """Say what is wrong in one line, and take options by their whole name only.

    Every command's is one, so that what all of them take may stand before a command or after it.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        says = "log what the engine chooses and does"
        # Without a default: that of a command would hide what stands before it.
        self.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help=says)

    def error(self, message: str) -> NoReturn:
        """Exit with the message and where to read more."""
        self.exit(USER_ERROR, f"specdec: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    command: Callable[[argparse.Namespace], None] = args.command
    try:
        command(args)
    except SpecdecError as error:
        print(f"specdec: {'; '.join(str(error).splitlines())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; what Python still holds back for it must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="specdec", description=__doc__)
    parser.set_defaults(verbose=False)
    parser.add_argument("--version", action="version", version=f"specdec {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="complete a prompt, streamed to the terminal"))
    _add_info(commands.add_parser("info", help="what a model is made of and what memory it needs"))
    benches = commands.add_parser("bench", help="measure").add_subparsers(required=True, metavar="BENCHMARK")
    _add_throughput(benches.add_parser("throughput", help="prefill and decode speed, beside other engines"))
    add_acceptance(
        benches.add_parser("acceptance", help="how much of drafts is accepted, and what that earns")
    )
    add_kernels(benches.add_parser("kernels", help="each operation: checked, then timed beside its bytes"))
    add_model(benches.add_parser("model", help="the bytes of a step and the speed they allow, computed"))
    add_prefix(benches.add_parser("prefix", help="what prefixes that are kept save, simulated or timed"))
    add_serve(benches.add_parser("serve", help="a running server: latencies, speed, what its drafts earn"))
    add_train(commands.add_parser("train", help="train the small checkpoint that ships, heads included"))
    add_server(commands.add_parser("serve", help="an HTTP server that clients of OpenAI's API speak to"))
    _add_top(commands.add_parser("top", help="watch a running server: its memory, requests and drafts"))
    shown = commands.add_parser("demo", help="stream completions of the model that ships, drafts in colour")
    shown.set_defaults(command=_demo)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_generate)
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face checkpoint")
    prompt = parser.add_mutually_exclusive_group(required=True)
    add = prompt.add_argument
    add("--prompt", metavar="TEXT")
    add("--prompt-file", metavar="FILE", help="a file with the prompt; - is standard input")
    add("--prompt-ids", metavar="IDS", help='token ids, as in "12 7 9"; - reads them from standard input')
    parser.add_argument("--json", action="store_true", help="print one JSON object per completion instead")
    parser.add_argument(
        "--colour",
        choices=COLOURS,
        default="auto",
        help="tokens accepted from the draft; auto: on a terminal, unless NO_COLOR is set (default: auto)",
    )
    add_settings(parser, SamplingParams, title="sampling")
    add_settings(parser, EngineConfig, title="engine", without=SamplingParams.model_fields)


def _generate(args: argparse.Namespace) -> None:
    prompt, params = _prompt(args), settings_from(args, SamplingParams)
    config = settings_from(args, EngineConfig)
    if config.synthetic_acceptance is not None:
        print(SYNTHETIC, file=sys.stderr)
    with SpecEngine(args.model, config) as engine:
        if params.n == 1 and not args.json:
            stream_text(engine, prompt, params, colour=args.colour)
        else:
            print_choices(engine, prompt, params, as_json=args.json, colour=args.colour)


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if args.prompt is not None:
        return str(args.prompt)
    if args.prompt_file is not None:
        return _read(None if args.prompt_file == "-" else Path(args.prompt_file), "--prompt-file")
    ids = _read(None, "--prompt-ids") if args.prompt_ids == "-" else args.prompt_ids
    words = ids.replace(",", " ").split()
    if wrong := [word for word in words if not re.fullmatch(r"-?\d{1,18}", word)]:
        raise RequestError(
            f'--prompt-ids: {reprlib.repr(wrong[0])} is no token id; give whole numbers, as in "12 7 9"',
            field="prompt",
        )
    return [int(word) for word in words]


def _read(path: Path | None, option: str) -> str:
    """Read a file, or standard input, as UTF-8 whatever the terminal's own encoding is."""
    source = path or "standard input"
    try:
        return (path.read_bytes() if path else sys.stdin.buffer.read()).decode("utf-8")
    except OSError as error:
        reason = f"{source} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        reason = f"{source} is not UTF-8 text from byte {error.start} on; convert it first"
    raise RequestError(f"{option}: {reason}", field="prompt")


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_info)
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face checkpoint")
    parser.add_argument(
        "--length",
        metavar="TOKENS",
        type=listed(at_least(1)),
        default=[1024, 8192, 32768],
        help="say how many sequences of these lengths fit (default: 1024,8192,32768)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_settings(parser, EngineConfig, title="engine")


def _info(args: argparse.Namespace) -> None:
    described = describe_model(args.model, settings_from(args, EngineConfig), args.length)
    if args.json:
        print(json.dumps(described))
        return
    width = max(map(len, described))
    for name, value in described.items():
        print(f"{name.replace('_', ' ').ljust(width)}  {_plain(name, value)}")


def _plain(name: str, value: Any) -> str:
    match value:
        case dict():
            return ", ".join(f"{count:,} {kind}" for kind, count in value.items())
        case float():
            return f"{value:.2%}"
        case int() if "bytes" in name:
            return f"{value:,} ({binary(value)})" if value >= 1024 else str(value)
        case int():
            return f"{value:,}"
        case _:
            return str(value)


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_throughput)
    add, counts = parser.add_argument, listed(at_least(1))
    add("model", metavar="MODEL", nargs="?", type=Path, help="folder of a Hugging Face checkpoint")
    add("--shape", metavar="NAME", help="without MODEL: random weights of a named size (default: tiny)")
    add("--batch", metavar="ROWS", type=counts, default=[1, 4, 16], help="with commas (default: 1,4,16)")
    add(
        "--prompt-tokens",
        metavar="TOKENS",
        type=counts,
        default=[32, 512],
        help="with commas (default: 32,512)",
    )
    add("--new-tokens", metavar="TOKENS", type=at_least(1), default=32, help="decode steps (default: 32)")
    add(
        "--window",
        metavar="TOKENS",
        type=counts,
        default=[],
        help="also time windows of these widths, as in 4,8",
    )
    add(
        "--peers",
        metavar="PEER",
        type=listed(str),
        default=[],
        help="transformers, URLs of servers, or both, with commas",
    )
    add("--repeats", metavar="TIMES", type=at_least(1), default=5, help="counted runs (default: 5)")
    add("--warmup", metavar="TIMES", type=at_least(0), default=1, help="uncounted runs (default: 1)")
    add_out(parser)
    add_random(parser)
    add_settings(parser, EngineConfig, title="engine")


def _throughput(args: argparse.Namespace) -> None:
    # Imported here, for it brings `transformers` along, which nothing else needs.
    from specdec.bench.random_run import run_random
    from specdec.bench.throughput import Options, run

    if args.profile and not args.random:
        raise ConfigError("profile: it belongs to --random; give it too", field="random")
    if args.model is not None and args.shape is not None:
        raise ConfigError("shape: a model is named too; measure either of them", field="shape")
    config = settings_from(args, EngineConfig)
    if args.fp8:
        config = EngineConfig.of(config, {"quantize": "fp8"})
    out = out_file(args)
    options = Options(
        model=args.model,
        shape=args.shape or "tiny",
        batches=args.batch,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        peers=args.peers,
        repeats=args.repeats,
        warmup=args.warmup,
        seed=config.seed or 0,
        windows=args.window,
    )
    if args.random:
        run_random(options, config, out, profile=args.profile)
    else:
        run(options, config, out)


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_top)
    add, url = parser.add_argument, "http://127.0.0.1:8000"
    add("url", metavar="URL", nargs="?", default=url, help=f"a specdec server (default: {url})")
    add("--interval", metavar="SECONDS", type=above_0, default=1.0, help="between two looks (default: 1)")
    add("--once", action="store_true", help="print one picture, of two looks, and end")
    add("--api-key-env", metavar="NAME", help="the environment variable that holds the key")


def _top(args: argparse.Namespace) -> None:
    # Imported here, for no other command but a benchmark needs an HTTP client.
    from specdec.bench.client import check_url, reason
    from specdec.top.view import Options, run

    url, key = check_url(args.url if "://" in args.url else f"http://{args.url}"), secret(args.api_key_env)
    run(Options(url=url, api_key=key, interval_s=args.interval, once=args.once, reason=reason))


def _demo(_: argparse.Namespace) -> None:
    demo()


if __name__ == "__main__":
    sys.exit(main())
