"""The `generate`, `info`, `top` and `demo` commands.

Each checks its arguments, then imports its function and returns it: from there on Ctrl-C is an exception.
"""

import argparse
import json
import re
import reprlib
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from specdec.cli.text import binary
from specdec.cli.top.options import TopOptions
from specdec.config.engine import EngineConfig
from specdec.config.file import add_model_and_file, fill_in
from specdec.config.options import Run, add_options, add_settings, at_least, listed, secret, settings_from
from specdec.config.parser import Parser
from specdec.config.sampling import SamplingParams
from specdec.errors import ConfigError, RequestError
from specdec.models.folder import GIVEN, describable, find_models, short

COLOURS = ("auto", "always", "never")
SYNTHETIC = "SYNTHETIC ACCEPTANCE: drafts are accepted at given rates; the text is meaningless"


def add_generate(parser: Parser) -> None:
    """Add the options of `specdec generate`."""
    parser.set_defaults(command=_generate)
    add_model_and_file(parser, GIVEN)
    parser.text_option = "--prompt"
    add = parser.add_argument
    add("-p", "--prompt", metavar="TEXT", help="the prompt, which may also follow MODEL")
    add("--prompt-file", metavar="FILE", help="a file with the prompt; - is standard input")
    add("--prompt-ids", metavar="IDS", help='token ids, as in "12 7 9"; - reads them from standard input')
    parser.add_argument("--json", action="store_true", help="print one JSON object per completion instead")
    parser.add_argument(
        "--colour",
        choices=COLOURS,
        default="auto",
        help="colour accepted draft tokens; auto: on a terminal, unless NO_COLOR is set (default: auto)",
    )
    add_settings(parser, SamplingParams, title="sampling")
    add_settings(parser, EngineConfig, title="engine", without=SamplingParams.model_fields)


def _generate(args: argparse.Namespace) -> Run:
    fill_in(args, SamplingParams, EngineConfig)
    prompt, params = _prompt(args), settings_from(args, SamplingParams)
    config = settings_from(args, EngineConfig)
    if config.synthetic_acceptance is not None:
        print(SYNTHETIC, file=sys.stderr)
    folder, config = find_models(args.model, config)
    from specdec.cli.terminal import generate

    whole = params.n > 1 or args.json
    return partial(
        generate, folder, config, prompt, params, whole=whole, as_json=args.json, colour=args.colour
    )


def _prompt(args: argparse.Namespace) -> str | list[int]:
    sources = {"--prompt": args.prompt, "--prompt-file": args.prompt_file, "--prompt-ids": args.prompt_ids}
    options = [option for option, value in sources.items() if value is not None]
    if not options:
        raise RequestError(
            "the prompt is missing: give it after MODEL in quotes, or use --prompt-file or --prompt-ids",
            field="prompt",
        )
    if len(options) > 1:
        raise RequestError(f"{' and '.join(options)} both give a prompt; give one of them", field="prompt")
    if args.prompt is not None:
        return str(args.prompt)
    if args.prompt_file is not None:
        return read_text(None if args.prompt_file == "-" else Path(args.prompt_file), "--prompt-file")
    ids = read_text(None, "--prompt-ids") if args.prompt_ids == "-" else args.prompt_ids
    words = ids.replace(",", " ").split()
    if invalid := [word for word in words if not re.fullmatch(r"-?\d{1,18}", word)]:
        raise RequestError(
            f'--prompt-ids: {reprlib.repr(invalid[0])} is not a token id; give integers, as in "12 7 9"',
            field="prompt",
        )
    return [int(word) for word in words]


def read_text(path: Path | None, option: str) -> str:
    """Read a file or standard input as UTF-8, whatever the locale's encoding."""
    source = short(path) if path else "standard input"
    try:
        return (path.read_bytes() if path else sys.stdin.buffer.read()).decode("utf-8")
    except OSError as error:
        reason = f"{source} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        reason = f"{source} is not UTF-8 text from byte {error.start} on; convert it first"
    except ValueError as error:  # an invalid file name
        reason = f"{source} cannot be read: {error}"
    raise RequestError(f"{option}: {reason}", field="prompt")


def add_info(parser: Parser) -> None:
    """Add the options of `specdec info`."""
    parser.set_defaults(command=_info)
    add_model_and_file(parser, GIVEN)
    parser.add_argument(
        "--length",
        metavar="TOKENS",
        type=listed(at_least(1)),
        default=[1024, 8192, 32768],
        help="show how many sequences of these lengths fit (default: 1024,8192,32768)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_settings(parser, EngineConfig, title="engine")


def _info(args: argparse.Namespace) -> Run:
    fill_in(args, EngineConfig)
    config = settings_from(args, EngineConfig)
    with ExitStack() as stack:
        folder, config = stack.enter_context(describable(args.model, config))
        from specdec.setup.footprint import describe_model

        resources = stack.pop_all()

    def show() -> None:
        with resources:
            described = describe_model(folder, config, args.length)
        if args.json:
            print(json.dumps(described))
            return
        figures = {name: value for name, value in described.items() if value != 0}
        width = max(len(WORDS[name]) for name in figures)
        for name, value in figures.items():
            print(f"{WORDS[name].ljust(width)}  {_plain(name, value)}")

    return show


WORDS = {
    "family": "family",
    "layers": "layers",
    "dtype": "dtype",
    "kernels": "kernels",
    "parameters": "parameters, without draft heads",
    "tp": "ranks; bytes below, except those in the files, are of one rank",
    "rank_parameters": "parameters of one rank",
    "mtp_parameters": "parameters of the multi-token head",
    "eagle_parameters": "parameters of the EAGLE or block head",
    "heads": "draft heads in the checkpoint",
    "stored_types": "matrix types in the GGUF file",
    "stored_bytes": "weights in the files",
    "stored_8bit_bytes": "weights in 8 bits",
    "stored_6bit_bytes": "weights in 6 bits",
    "stored_4bit_bytes": "weights in 4 bits",
    "weight_bytes": "weights in memory, without draft heads",
    "read_bytes_per_token": "weights read to decode one token",
    "kv_dtype": "dtype of the KV cache",
    "kv_bytes_per_token": "KV cache per token",
    "state_bytes": "recurrent state per sequence",
    "draft": "drafters",
    "copy_bytes": "4-bit copy for drafts",
    "draft_slot": "draft slots",
    "record_bytes": "record per draft token",
    "record_share": "record relative to a state",
    "max_model_len": "maximum tokens per sequence",
    "max_running": "maximum running sequences",
    "slab_bytes": "slab (unit of memory)",
    "slab_padding": "padding in a slab",
    "arena_bytes": "memory for sequences and drafts",
    "sequences": "sequences that fit",
}
"""Names of the figures in the table; figures that a model lacks are omitted."""


def _plain(name: str, value: Any) -> str:
    match value:
        case dict() if name == "sequences":
            lengths = {int(length.split()[0]): count for length, count in value.items()}
            return ", ".join(f"{count:,} of {length:,} tokens" for length, count in lengths.items())
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


def add_top(parser: Parser) -> None:
    """Add the options of `specdec top`."""
    parser.set_defaults(command=_top)
    url = TopOptions.model_fields["url"]
    parser.add_argument(
        "url", metavar="URL", nargs="?", default=url.default, help=f"{url.title} (default: {url.default})"
    )
    add_options(parser, TopOptions, without={"url"})


def _top(args: argparse.Namespace) -> Run:
    options = settings_from(args, TopOptions)
    if options.api_key is not None and options.api_key_env is not None:
        raise ConfigError("--api-key: --api-key-env gives the key already; give one of them", field="api_key")
    key = secret(options.api_key_env) if options.api_key is None else options.api_key
    # Imported late: only benchmarks and `top` need an HTTP client.
    from specdec.cli.top.view import run

    return partial(run, options, key)


def add_demo(parser: Parser) -> None:
    """Add no options: the demo is always the same."""
    parser.set_defaults(command=_demo)


def _demo(_: argparse.Namespace) -> Run:
    from specdec.cli.demo import demo

    return demo
