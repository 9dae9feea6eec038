"""What all handlers share: the engine, who may use it, and how much is under way."""

import asyncio
import contextlib
import hmac
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from specdec.chat import load_template
from specdec.config import SamplingParams
from specdec.engine import Prepared, Prompt, SpecEngine
from specdec.errors import ConfigError
from specdec.server.answers import Answers, Bell
from specdec.server.connections import Connections
from specdec.server.failures import Failure, without_inside
from specdec.server.metrics import Metrics
from specdec.server.settings import ServerConfig
from specdec.server.tools.offer import format_of

logger = logging.getLogger(__name__)

KEY_VARIABLE = "SPECDEC_API_KEY"
BUSY = {"Retry-After": "1"}
LONG = 20_000
"""Characters, or ids, of prompts that take a while to read."""
STOPPING = {"Retry-After": "10"}


class State:
    """Owned by the event loop's thread."""

    def __init__(self, engine: SpecEngine, config: ServerConfig, folder: Path) -> None:
        self.engine, self.config = engine, config
        self.template = load_template(folder)
        self.calls = format_of(config.tool_call_parser, self.template)
        """How the model calls tools, if it does."""
        self.names = config.served_model_name or [folder.name]
        self.max_model_len = engine.model.settings.max_model_len
        self.keys = read_keys(config)
        self.bell = Bell(asyncio.get_running_loop())
        self.metrics = Metrics(engine, self.names[0])
        self.connections = Connections(config.max_connections)
        self.draining = False
        self._answers: set[Answers] = set()
        self.choices = 0
        """Under way, of all requests."""
        self.idle = asyncio.Event()
        self.idle.set()

    @contextlib.contextmanager
    def under_way(self, choices: int) -> Iterator[None]:
        """Take a request in, or refuse it because there are too many."""
        self.check_engine()
        if self.draining:
            raise Failure(503, "The server is stopping; ask another one.", code="stopping", headers=STOPPING)
        most = self.config.max_queued
        if choices > most:
            raise Failure(
                400,
                f"n: {choices} choices are more than the {most} that may be under way; ask for fewer.",
                param="n",
            )
        if self.choices + choices > most:
            raise Failure(
                429,
                f"{self.choices} choices are under way, of at most {most}; try again later.",
                code="too_many_requests",
                headers=BUSY,
            )
        self.choices += choices
        self.idle.clear()
        try:
            yield
        finally:
            self.choices -= choices
            if not self.choices:
                self.idle.set()

    @contextlib.contextmanager
    def answering(self, answers: Answers) -> Iterator[None]:
        """Know what is being answered, for the day that it must end."""
        self._answers.add(answers)
        try:
            yield
        finally:
            self._answers.discard(answers)

    def end_all(self) -> None:
        """Tell all who are being answered that the server stops."""
        for answers in self._answers:
            answers.end(Failure(503, "The server is stopping.", code="stopping", headers=STOPPING))

    def check_engine(self) -> None:
        """Say that nothing can be served any more, if so."""
        if fault := self.engine.fault:
            raise Failure(503, without_inside(fault), code="engine_error", headers=STOPPING)

    def admit(self, request: web.Request) -> None:
        """Refuse who brings none of the keys; all are compared, each in a time that tells nothing."""
        if not self.keys:
            return
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        matches = [
            hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key) for key in self.keys
        ]
        if kind.lower() != "bearer" or not any(matches):
            raise Failure(
                401,
                "This server wants a key that it knows: send the header 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def prepare(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Prepared]:
        """Look at all prompts before one is begun: a mistake in the last must not cost the first's work."""
        if self.config.log_prompts:
            logger.info("prompts: %r", prompts)

        def prepare() -> list[Prepared]:
            return [self.engine.prepare(prompt, params) for prompt in prompts]

        takes_long = params.structured_outputs or sum(map(len, prompts)) > LONG
        return await asyncio.to_thread(prepare) if takes_long else prepare()

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Turn a text into tokens."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise Failure(400, "prompt: the model has no tokenizer; send token ids.", param="prompt")
        try:
            if len(text) > LONG:
                return await asyncio.to_thread(tokenizer.encode, text, special=special)
            return tokenizer.encode(text, special=special)
        except (UnicodeError, TypeError):
            raise Failure(400, "prompt: it is no valid Unicode text.", param="prompt") from None

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, answer: bool
    ) -> list[int]:
        """Turn a chat into tokens as the model's template has it."""
        text = self.template.render(messages, variables, answer=answer)
        return await self.encode(text, special=self.template.is_plain)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise Failure(
                404,
                f"model: {name!r:.80} is not served here; use {' or '.join(map(repr, self.names))}.",
                param="model",
                code="model_not_found",
            )


def read_keys(config: ServerConfig) -> list[bytes]:
    """Collect the keys that an operator has given, wherever."""
    keys = [*(config.api_key or []), os.environ.get(KEY_VARIABLE, "")]
    if config.api_key and not all(key.strip() for key in config.api_key):
        raise ConfigError(
            "api_key: it is empty, which would let everybody in; give one, or leave the option out.",
            field="api_key",
        )
    if config.api_key_file:
        try:
            keys += Path(config.api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"api_key_file: {config.api_key_file} cannot be read ({error}); give a text file with "
                "one key on each line.",
                field="api_key_file",
            ) from error
        if not any(key.strip() for key in keys):
            raise ConfigError(
                f"api_key_file: {config.api_key_file} holds no key; write one on each line.",
                field="api_key_file",
            )
    return [key.strip().encode() for key in keys if key.strip()]
