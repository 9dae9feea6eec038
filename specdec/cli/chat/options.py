"""The options of `specdec chat MODEL`."""

import argparse
import sys
from functools import partial
from types import MappingProxyType
from typing import Any

from specdec.cli.commands import COLOURS, SYNTHETIC, read_text
from specdec.config.engine import EngineConfig
from specdec.config.file import add_model_and_file, fill_in
from specdec.config.options import Run, add_settings, settings_from
from specdec.config.parser import Parser
from specdec.config.sampling import SamplingParams
from specdec.errors import RequestError
from specdec.models.folder import GIVEN, find_models

NOT_IN_CHATS = frozenset(
    {
        "n",
        "logprobs",
        "prompt_logprobs",
        "logit_bias",
        "cache_marks",
        "structured_outputs",
        "thinking",
        "trees",
    }
)
"""Request parameters that a chat sets itself, cannot show, or cannot parse from a line."""
DEFAULTS = MappingProxyType(
    {
        "max_tokens": "maximum tokens of an answer, also -n (default: the checkpoint's, else 4096; 256 "
        "without a chat template)"
    }
)
"""Help of parameters whose default is specific to chats."""


class _Thinking(argparse.BooleanOptionalAction):
    """Accept `--think` or `--no-think`, but not both."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *args: Any) -> None:
        previous = getattr(namespace, self.dest)
        super().__call__(parser, namespace, *args)
        if previous not in (None, getattr(namespace, self.dest)):
            parser.error("--think and --no-think contradict each other; give one of them")


def add_chat(parser: Parser) -> None:
    """Add the options of `specdec chat`."""
    parser.set_defaults(command=_chat)
    parser.text_option = "--message"
    add_model_and_file(parser, GIVEN)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "-p",
        "--message",
        metavar="TEXT",
        help="answer this message and exit; it may also follow MODEL or be piped in",
    )
    parser.add_argument("--think", action=_Thinking, help="switch thinking, if the chat template supports it")
    parser.add_argument(
        "--colour",
        choices=COLOURS,
        default="auto",
        help="colour figures and notices; auto: on a terminal, unless NO_COLOR is set (default: auto)",
    )
    add_settings(parser, SamplingParams, title="sampling", without=NOT_IN_CHATS, says=DEFAULTS)
    add_settings(parser, EngineConfig, title="engine", without=SamplingParams.model_fields)


def _chat(args: argparse.Namespace) -> Run:
    fill_in(args, SamplingParams, EngineConfig)
    params, config = settings_from(args, SamplingParams), settings_from(args, EngineConfig)
    if config.synthetic_acceptance is not None:
        print(SYNTHETIC, file=sys.stderr)
    folder, config = find_models(args.model, config)
    message = args.message
    if message is None and not (sys.stdin and sys.stdin.isatty()):
        message = read_text(None, "standard input").removesuffix("\n") if sys.stdin else ""
    if message is not None and not message.strip():
        raise RequestError("message: it is empty; give --message, or pipe text in.", field="message")
    from specdec.cli.chat.run import ChatStart, chat

    opening = ChatStart(system=args.system, thinks=args.think, message=message)
    return partial(chat, folder, config, params, opening, colour=args.colour)
