"""`specdec serve MODEL`: its options."""

import argparse
import logging

from specdec.config.engine import EngineConfig
from specdec.config.file import add_model_and_file, fill_in
from specdec.config.options import Run, add_settings, settings_from
from specdec.models.folder import find_models
from specdec.server.logs import FORMATTERS, NamingFilter
from specdec.server.settings import ServerConfig


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_serve)
    add_model_and_file(parser, "folders, GGUF files, OWNER/NAME[:TAG] on the hub, tiny", several=True)
    add_settings(parser, ServerConfig, title="server")
    add_settings(parser, EngineConfig, title="engine")


def _serve(args: argparse.Namespace) -> Run:
    fill_in(args, ServerConfig, EngineConfig, several=True)
    config, engine_config = settings_from(args, ServerConfig), settings_from(args, EngineConfig)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(FORMATTERS[config.log_format])
        if len(args.model) > 1:
            handler.addFilter(NamingFilter())
    logging.getLogger("specdec").setLevel(logging.DEBUG if args.verbose else logging.INFO)
    models = [find_models(model, engine_config) for model in args.model]
    # Imported here, since no other command needs a web server.
    from specdec.server.listen import bind

    sock = bind(config.host, config.port)  # report a port in use before the imports, which take a second
    from specdec.server.run import run

    def start() -> None:
        with sock:
            run([folder for folder, _ in models], models[0][1], config, sock)

    return start
