"""`specdec serve MODEL`: its options."""

import argparse
import logging
from functools import partial

from specdec.config.engine import EngineConfig
from specdec.config.options import Run, add_settings, settings_from
from specdec.models.folder import find_folder
from specdec.server.logs import FORMATTERS
from specdec.server.settings import ServerConfig


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_serve)
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="+",
        help="folders of Hugging Face checkpoints, or tiny",
    )
    add_settings(parser, ServerConfig, title="server")
    add_settings(parser, EngineConfig, title="engine")


def _serve(args: argparse.Namespace) -> Run:
    config, engine_config = settings_from(args, ServerConfig), settings_from(args, EngineConfig)
    for model in args.model:
        find_folder(model)
    # Imported here, for no other command needs a web server.
    from specdec.server.run import run

    for handler in logging.getLogger().handlers:
        handler.setFormatter(FORMATTERS[config.log_format])
    logging.getLogger("specdec").setLevel(logging.DEBUG if args.verbose else logging.INFO)
    return partial(run, args.model, engine_config, config)
