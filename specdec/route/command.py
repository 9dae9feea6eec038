"""`specdec route`: its options."""

import argparse
import logging
from functools import partial

from specdec.config.options import Run, add_settings, settings_from
from specdec.route.addresses import given_addresses
from specdec.route.settings import RouteConfig
from specdec.server.logs import FORMATTERS


def add_router(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specdec route`."""
    parser.set_defaults(command=_route)
    add_settings(parser, RouteConfig, title="router")


def _route(args: argparse.Namespace) -> Run:
    config = settings_from(args, RouteConfig)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(FORMATTERS[config.log_format])
    logging.getLogger("specdec").setLevel(logging.DEBUG if args.verbose else logging.INFO)
    addresses = given_addresses(config)
    # Imported here, for no other command needs a web server.
    from specdec.route.run import run

    return partial(run, config, addresses)
