"""Processes that run llguidance: a template with the vocabulary loaded, and a fork of it for each grammar.

Run as `python -m specdec.text.grammar.child FD`, with a socket to the engine. For each byte received, the
template sends back one end of a new socket and forks a process that serves the other end: it compiles one
grammar and follows the outputs that use it. The fork's resources are limited, since llguidance cannot be
interrupted: SIGPROF ends it if an operation uses too much CPU time, and RLIMIT_DATA bounds its memory. It
exits when the engine closes the socket.
"""

import json
import marshal
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path as File
from typing import IO, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from specdec.text.grammar.lark import HARMLESS, to_llguidance
from specdec.text.grammar.wire import COST, DONE, FAILED, HEAD, Job, Kind, Path, framed

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=500_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""A step within these limits takes about 25 ms at most, and a lexer with the most states 100 MB."""
MOST_BYTES, TOKEN_BYTES, TOKENS_AHEAD = 256 << 20, 1 << 10, 4096
"""Memory limit in bytes: of a grammar's process, and more for each token of its outputs (200 are used),
raised for this number of tokens at a time."""
COMPILE_S, FOLLOW_S = 20.0, 0.05
"""Limits of CPU time: to compile a grammar, and for one token or mask. Simple grammars take a thousandth."""
LATEST_S = 60.0
"""Limit of wall time to compile a grammar: a waiting process uses no CPU time."""
PROMPT_S, HURRIED_S = 0.5, 0.005
"""CPU time of compiling, and of one mask, after which the process gets a low priority."""
LOW_PRIORITY = 10
"""Nice value: a tenth of the engine's share of a busy core. With 19, a seventieth, refusing a hundred
requests for one slow regex took over two minutes beside four busy processes."""
LIMITED = ("lexer error", "parser error")
"""How llguidance's messages about its limits begin; others say that no token, or not this one, is allowed."""


class Vocabulary(NamedTuple):
    """Shared by all grammars."""

    tokenizer: LLTokenizer
    mask_bytes: int
    eos: tuple[int, ...]


class PlainText:
    """Tokenize text that a grammar forces: names of special tokens in it are text.

    llguidance allows only the first of these tokens, and would take the special token that it then refuses.
    """

    bos_token_id = None

    def __init__(self, source: str, inner: LLTokenizer) -> None:
        self._inner, self._tokenizer = inner, Tokenizer.from_str(source)
        self._tokenizer.encode_special_tokens = True
        self.eos_token_id = inner.eos_token
        self.tokens = [inner.decode_bytes([token]) for token in range(inner.vocab_size)]
        self.special_token_ids = [token for token in range(inner.vocab_size) if inner.is_special_token(token)]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        is_exact = b"".join(self.tokens[token] for token in ids) == text.encode()
        return ids if is_exact else self._inner.greedy_tokenize(text)  # SentencePiece adds a space


def main() -> None:
    """Load the vocabulary, then fork this process for each byte received."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        with control.makefile("rb") as frames:
            tokenizer, size, vocab, eos = json.loads(receive(frames))
        inner = LLTokenizer(tokenizer, n_vocab=size, eos_token=eos or None)
        plain = TokenizerWrapper(PlainText(tokenizer, inner))
        inner = LLTokenizer(plain, n_vocab=size, eos_token=eos or None)
        vocabulary = Vocabulary(inner, -(-vocab // 32) * 4, tuple(eos))
        control.sendall(framed(DONE))
        while control.recv(1):
            local, remote = socket.socketpair()
            with local, remote:
                if os.fork() == 0:
                    control.close()
                    remote.close()
                    try:
                        serve(local, vocabulary)
                    finally:
                        os._exit(0)
                socket.send_fds(control, [DONE], [remote.fileno()])


def serve(engine: socket.socket, vocabulary: Vocabulary) -> None:
    """Compile the grammar, then follow its outputs until the engine closes the socket."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    match = re.search(r"^VmData:\s*(\d+) kB", File("/proc/self/status").read_text("ascii"), re.MULTILINE)
    base = (int(match[1]) << 10 if match else 0) + MOST_BYTES
    _limit_memory(base)
    covered = 0
    with engine.makefile("rb") as frames:
        try:
            kind, source = json.loads(receive(frames))
            follower = compile_grammar(vocabulary, kind, source)
            engine.sendall(framed(DONE + follower.first))
        except Exception as error:
            engine.sendall(framed(FAILED + _shortened(str(error)).encode()))
            return
        while frame := receive(frames):
            for job in marshal.loads(frame):
                if follower.num_tokens > covered:
                    covered = follower.num_tokens + TOKENS_AHEAD
                    _limit_memory(base + covered * TOKEN_BYTES)
                if (answer := follower.answer(Job(*job))) is not None:
                    engine.sendall(framed(answer))


class Output:
    """The matcher of one output, and its tokens."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.tokens: list[int] = []
        self.is_over = False


class Follower:
    """Follow the outputs of one grammar, and their draft paths."""

    def __init__(self, compiled: LLMatcher, vocabulary: Vocabulary) -> None:
        self._compiled, self._vocabulary = compiled, vocabulary
        self._outputs: dict[int, Output] = {}
        self.num_tokens = 0
        """Total tokens of the outputs being followed."""
        self._is_hurried = True
        self.first = self._here(compiled)
        """The mask at the beginning of an output."""
        if self.first[0] in (Kind.DEAD, Kind.OVER):
            raise ValueError("no text matches this grammar")

    def answer(self, job: Job) -> bytes | None:
        """Advance an output by its accepted tokens, and return the masks of the requested paths."""
        if job.taken is None:
            if finished := self._outputs.pop(job.output, None):
                self.num_tokens -= len(finished.tokens)
            return None
        if job.output not in self._outputs:
            self._outputs[job.output] = Output(self._compiled.deep_copy())
        output = self._outputs[job.output]
        self.num_tokens += len(job.taken)
        start_s = time.thread_time()
        self._advance(output, job.taken)
        masks = [self._place(output, path) for path in job.paths]
        took_s = time.thread_time() - start_s
        if self._is_hurried and took_s > HURRIED_S * (len(masks) + len(job.taken)):
            self._is_hurried = False
            os.nice(LOW_PRIORITY)
        return b"".join((COST.pack(took_s), *masks))

    def _advance(self, output: Output, tokens: Sequence[int]) -> None:
        """Consume accepted tokens. The grammar allows them unless it allowed none."""
        for token in tokens:
            if token in self._vocabulary.eos:
                output.is_over = True
            else:
                with Alarm(FOLLOW_S):
                    output.matcher.consume_token(token)
        output.tokens += tokens

    def _place(self, output: Output, path: Path) -> bytes:
        """Return the mask after a path; any token is allowed after a draft path outside the grammar."""
        matcher, ends = output.matcher, path[-1:] and path[-1] in self._vocabulary.eos
        steps = list(path[:-1] if ends else path)
        with Alarm(FOLLOW_S):
            count = matcher.try_consume_tokens(steps)
            if count < len(steps) and not matcher.is_error():
                mask = bytes([Kind.FREE])
            elif output.is_over or ends:
                mask = bytes([Kind.OVER if output.is_over or matcher.is_accepting() else Kind.FREE])
            else:
                mask = self._here(matcher)
            if not matcher.is_error():
                matcher.rollback(count)
        if path and matcher.is_error():  # for good: the matcher is of no more use to the output
            tokens, output.tokens = output.tokens, []
            output.matcher = self._compiled.deep_copy()
            self._advance(output, tokens)
        return mask

    def _here(self, matcher: LLMatcher) -> bytes:
        """Return the matcher's mask. Without EOS an output ends as soon as it may."""
        if not self._vocabulary.eos and matcher.is_accepting():
            return bytes([Kind.OVER])
        words = matcher.compute_bitmask()[: self._vocabulary.mask_bytes]
        if matcher.is_error():
            if (error := matcher.get_error()).startswith(LIMITED):
                raise ValueError(error)  # ends this process: all matchers of a grammar share the lexer
            return bytes([Kind.DEAD])
        return bytes([Kind.BOUND]) + words


class Alarm:
    """Kill the process if the block uses more CPU time than the limit."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def receive(frames: IO[bytes]) -> bytes:
    """Receive a frame; an empty one at the end."""
    head = frames.read(HEAD.size)
    return frames.read(*HEAD.unpack(head)) if len(head) == HEAD.size else b""


def compile_grammar(vocabulary: Vocabulary, kind: str, source: str) -> Follower:
    slow = threading.Timer(PROMPT_S, os.setpriority, (os.PRIO_PROCESS, os.getpid(), LOW_PRIORITY))
    slow.start()
    signal.setitimer(signal.ITIMER_REAL, LATEST_S)
    with Alarm(COMPILE_S):
        try:
            matcher = LLMatcher(vocabulary.tokenizer, to_llguidance(kind, source), log_level=0, limits=LIMITS)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is malformed: {error!r}") from None
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        warnings = matcher.get_grammar_warnings()
        if warning := next((text for text in warnings if not text.startswith(HARMLESS)), None):
            raise ValueError(f"unsupported: {warning.removeprefix('Unimplemented keys: ')}")
        follower = Follower(matcher, vocabulary)
    signal.setitimer(signal.ITIMER_REAL, 0)
    slow.cancel()
    return follower


def _shortened(message: str) -> str:
    """Return the first line of a message, and the cause if it comes later."""
    cause = re.search(r"^error: (.*)", message, re.MULTILINE)
    return f"{message.splitlines()[0]}{f' {cause[1]}' if cause else ''}"[:300]


def _limit_memory(max_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, hard))


if __name__ == "__main__":
    main()
