"""The `specdec` command. A user's mistake prints one line and exits with code 2."""

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from specdec import __version__
from specdec.config.parser import USER_ERROR, Parser, as_typed, as_written
from specdec.errors import SpecdecError

INTERRUPTED = 130

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "generate": ("complete a prompt, streamed to the terminal", "cli.commands:add_generate"),
        "chat": ("chat with a model in the terminal", "cli.chat.options:add_chat"),
        "info": ("layers, parameters and memory of a model", "cli.commands:add_info"),
        "bench": ("measure", "cli:add_benchmarks"),
        "serve": ("serve models over OpenAI's and Anthropic's APIs", "server.command:add_server"),
        "ray": ("serve replicas of a model on Ray", "ray.command:add_ray"),
        "top": ("watch a running server: its memory, requests and drafts", "cli.commands:add_top"),
        "demo": ("stream completions of the shipped model, drafts in colour", "cli.commands:add_demo"),
    }
)
"""Help text and the function that adds the options; a command is imported when it is chosen."""

_RUN = "specdec chat MODEL talks to a model in the terminal, specdec serve MODEL serves it over HTTP"
_DOWNLOAD = "a model named OWNER/NAME is downloaded when it is first used, as in specdec chat OWNER/NAME"
_CACHE = "`hf cache ls` lists the models that were downloaded, specdec info MODEL describes one"
_SERVED = "specdec top watches a running server, whose /v1/models lists what it serves"
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("run", "load", "start"), _RUN),
        **dict.fromkeys(("pull", "get", "download"), _DOWNLOAD),
        **dict.fromkeys(("list", "ls", "models"), _CACHE),
        "ps": _SERVED,
        **dict.fromkeys(("show", "describe"), "specdec info MODEL describes a model"),
        **dict.fromkeys(("rm", "remove"), "`hf cache rm model/OWNER/NAME` deletes a model"),
        "stop": "Ctrl-C ends specdec serve",
        "create": "settings of a model are kept in a file, as in specdec serve --config FILE",
        "quantize": "weights are quantised when they are loaded, as in specdec serve MODEL --quantize int4",
        "help": "specdec --help lists the commands, specdec COMMAND --help the options of one",
        "version": "specdec --version prints it",
        "complete": "specdec generate MODEL --prompt TEXT completes a prompt",
    }
)
"""Commands of other programs, and their equivalents here."""

EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "generate": 'tiny "def fib(n):" --max-tokens 64 --temperature 0',
        "chat": "Qwen/Qwen3.5-0.8B",
        "info": "Qwen/Qwen3.5-0.8B",
        "bench": "throughput tiny --batch 1",
        "serve": "tiny --port 8080",
        "ray": "tiny --num-replicas 2",
        "top": "http://127.0.0.1:8000",
        "demo": "",
        "bench throughput": "tiny --batch 1,4",
        "bench acceptance": "tiny --out report",
        "bench serve": "http://127.0.0.1:8000",
    }
)
"""An example command line for each command's help."""

BENCHMARKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "throughput": (
            "prefill and decode speed, compared with other engines",
            "bench.commands:add_throughput",
        ),
        "acceptance": (
            "acceptance length and speedup by drafter and shape",
            "bench.acceptance.command:add_acceptance",
        ),
        "serve": ("latencies, throughput and acceptance of a running server", "bench.commands:add_serve"),
    }
)


def main(argv: Sequence[str] | None = None, *, on_start: Callable[[], None] | None = None) -> int:
    """Run one command and return its exit code; `on_start` is called once everything is imported."""
    return run_command(_parser(), argv, on_start=on_start)


def run_command(
    parser: Parser, argv: Sequence[str] | None, *, on_start: Callable[[], None] | None = None
) -> int:
    """Run the command that the arguments choose, and return its exit code."""
    args = parser.parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    command: Callable[[argparse.Namespace], Callable[[], None]] = args.command
    try:
        run = command(args)
        if on_start:
            on_start()
        run()
    except SpecdecError as error:
        print(f"specdec: {_line(as_typed(as_written(str(error), args.written)))}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _line(message: str) -> str:
    """Put a message on one line, without control characters, which names in a checkpoint may contain."""
    line = "; ".join(message.splitlines())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def _parser() -> Parser:
    parser = Parser(
        prog="specdec", description="Run hybrid language models, decoded speculatively.", instead=INSTEAD
    )
    parser.set_defaults(verbose=False)
    parser.add_argument("--version", action="version", version=f"specdec {__version__}")
    _add(parser, COMMANDS, "COMMAND")
    return parser


def add_benchmarks(parser: Parser) -> None:
    """Add the benchmarks as subcommands of `bench`."""
    _add(parser, BENCHMARKS, "BENCHMARK")


def _add(parser: Parser, commands: Mapping[str, tuple[str, str]], metavar: str) -> None:
    chosen = parser.add_subparsers(title=f"{metavar.lower()}s", required=True, metavar=metavar)
    for name, (help_text, home) in commands.items():
        _, *above = parser.prog.split()
        command = " ".join((*above, name))
        example = f"example: specdec {command} {EXAMPLES[command]}".rstrip()
        chosen.add_parser(name, help=help_text, fill=partial(_fill, home), epilog=example)


def _fill(home: str, parser: Parser) -> None:
    """Import a command's `module:function`, and add its options."""
    module, _, function = home.partition(":")
    getattr(importlib.import_module(f"specdec.{module}"), function)(parser)
