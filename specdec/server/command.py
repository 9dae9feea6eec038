"""`specdec serve MODEL`: its options."""

import argparse
import logging

from specdec.config import EngineConfig
from specdec.options import add_settings, settings_from
from specdec.server.settings import ServerConfig

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Of the log: a server's is read long after."""


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_serve)
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face checkpoint, or tiny")
    add_settings(parser, ServerConfig, title="server")
    add_settings(parser, EngineConfig, title="engine")


def _serve(args: argparse.Namespace) -> None:
    # Imported here, for no other command needs a web server.
    from specdec.server.run import run

    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(LINE))
    logging.getLogger("specdec").setLevel(logging.DEBUG if args.verbose else logging.INFO)
    run(args.model, settings_from(args, EngineConfig), settings_from(args, ServerConfig))
