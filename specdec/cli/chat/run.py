"""Run a chat: one turn for a given message, or turns at a terminal until it ends."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from specdec.cli.chat.commands import COMMANDS, CommandReply, run_command
from specdec.cli.chat.conversation import Conversation, check_text
from specdec.cli.chat.history import ChatHistory, history_path
from specdec.cli.chat.session import ChatSession
from specdec.cli.chat.typed import Keyboard, handling_interrupts, unechoed
from specdec.cli.chat.view import ChatView
from specdec.cli.text import paints
from specdec.config.engine import EngineConfig
from specdec.config.folders import model_name
from specdec.config.sampling import SamplingParams
from specdec.engine.engine import SpecEngine
from specdec.errors import SpecdecError
from specdec.models.folder import SHIPPED

MOST_GIVEN_BACK = 4096
"""Maximum characters of a refused message offered for editing; a longer one is in the history."""


@dataclass(frozen=True, slots=True)
class ChatStart:
    """The initial state of a chat."""

    system: str | None = None
    thinks: bool | None = None
    message: str | None = None
    """The only message; None: read messages from the terminal."""


def chat(
    folder: Path, config: EngineConfig, params: SamplingParams, opening: ChatStart, *, colour: str
) -> None:
    """Answer one message, or without one run an interactive chat."""
    with SpecEngine(folder, config) as engine:
        is_talk, is_completion = opening.message is None, folder in SHIPPED.values()
        session = ChatSession(engine, folder, params, is_completion=is_completion, is_talk=is_talk)
        if opening.system:
            session.use_system(check_text(opening.system, "system"))
        if opening.thinks is not None:
            session.use_thinking(opening.thinks)
        view = ChatView(coloured=paints(colour))
        if opening.message is None:
            InteractiveChat(session, view).run(model_name(folder))
            return
        message = check_text(opening.message, "message")
        if not answer(session, session.conversation.asking(message), view):
            raise KeyboardInterrupt


def answer(chat: ChatSession, question: Conversation, view: ChatView) -> bool:
    """Show the answer and add it to the conversation; return False if it was interrupted."""

    def pressed(number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C does not wait for the end of a step.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        streaming.cancel()

    with chat.begin(question) as streaming, handling_interrupts(pressed):
        try:
            for parts in streaming:
                view.show(parts, drafts=chat.shows_drafts)
        finally:
            view.end_answer()
            chat.commit(question, streaming)
    if streaming.last and streaming.last.stats:
        view.figures(streaming.last.stats)
    if note := chat.explain_end(streaming):
        view.notice(note)
    return streaming.is_whole


class InteractiveChat:
    """An interactive chat."""

    def __init__(self, chat: ChatSession, view: ChatView) -> None:
        self.chat, self.view = chat, view
        self.keyboard = Keyboard(view, [*COMMANDS], ChatHistory(history_path()))

    def run(self, model: str) -> None:
        """Process messages and commands until one of them, or the terminal, ends the chat."""
        self._show_header(model)
        edit = ""
        while True:
            try:
                text = self.keyboard.read(edit)
            except EOFError:
                print(file=sys.stderr)
                return
            try:
                reply = self._take(text)
            except KeyboardInterrupt:  # within a command, or a second Ctrl-C: the text so far is kept
                reply = CommandReply()
            if reply.ends:
                return
            edit = reply.edit if len(reply.edit) <= MOST_GIVEN_BACK else ""

    def _show_header(self, model: str) -> None:
        chat = self.chat
        self.view.notice(
            f"{model}: {chat.max_model_len:,} tokens of context, drafters: {chat.engine.model.drafting}"
        )
        if chat.completes:
            reason = "This model only knows Python" if model in SHIPPED else "Without a chat template"
            self.view.notice(f"{reason}: an answer continues your text.")
        self.view.notice("/help lists commands, Ctrl-C stops an answer, Ctrl-D exits.")

    def _take(self, text: str) -> CommandReply:
        """Run a command or answer a message; print errors."""
        try:
            check_text(text, "message")  # some locales pass invalid bytes through
            reply = run_command(self.chat, text) or CommandReply(
                asks=self.chat.conversation.asking(text), edit=text
            )
        except SpecdecError as error:
            self.view.error(str(error))
            return CommandReply()
        self.view.table(reply.rows)
        if reply.says:
            self.view.say(reply.says)
        if reply.asks is None or not self._answer(reply.asks):
            return reply
        return CommandReply()

    def _answer(self, question: Conversation) -> bool:
        """Answer a question; return whether any text was generated."""
        previous = self.chat.conversation
        try:
            with unechoed():
                answer(self.chat, question, self.view)
        except SpecdecError as error:
            if self.chat.engine.fault:
                raise
            hint = (
                f" In this chat {self.chat.make_room}." if error.field == "prompt" and previous.turns else ""
            )
            self.view.error(f"{error}{hint}")
        current = self.chat.conversation
        if current == previous and current is not previous:
            self.view.notice("It is the same answer: /set seed none, and a temperature above 0, give others.")
        return current is not previous
