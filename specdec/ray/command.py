"""`specdec ray MODEL`: its options."""

import argparse
import logging
from functools import partial

from specdec.config.engine import EngineConfig
from specdec.config.file import add_model_and_file, fill_in
from specdec.config.options import Run, add_settings
from specdec.models.folder import GIVEN
from specdec.ray.settings import NOT_SERVED, RayApp, RayConfig
from specdec.server.logs import FORMATTERS
from specdec.server.settings import ServerConfig


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specdec ray`."""
    parser.set_defaults(command=_ray)
    add_model_and_file(parser, GIVEN)
    add_settings(parser, RayConfig, title="Ray")
    add_settings(parser, ServerConfig, title="server", without=NOT_SERVED)
    add_settings(parser, EngineConfig, title="engine")


def _ray(args: argparse.Namespace) -> Run:
    fill_in(args, RayConfig, ServerConfig, EngineConfig)
    app = RayApp.read(args)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(FORMATTERS[app.server.log_format])
    logging.getLogger("specdec").setLevel(logging.DEBUG if args.verbose else logging.INFO)
    # Imported here, since no other command needs a web server.
    from specdec.ray.run import check_ray, run

    check_ray()
    return partial(run, app, is_verbose=args.verbose)
