"""Processes that run xgrammar: a template that has it loaded, and a fork of it for each grammar.

Run as `python -m specdec.text.grammar.child FD`, with a socket to the engine. For each byte received, the
template sends back one end of a new socket and forks a process that serves the other end: it compiles one
grammar and follows the outputs that use it. The fork's resources are limited: SIGPROF ends it if an operation
uses too much CPU time, and RLIMIT_DATA bounds its memory. It exits when the engine closes the socket.
"""

import gc
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path as File
from typing import Any, NamedTuple

from specdec.text.grammar.repetitions import check_repetitions
from specdec.text.grammar.wire import COST, DONE, FAILED, HEAD, Job, Kind, Path, framed, unpack

BLANKS = 1
"""Maximum whitespace characters between two JSON tokens: small models start to indent and never stop."""
WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""The prefix of xgrammar's messages: the time and a source line."""
DEEPEST = 64
"""Maximum nesting of a schema: compile time grows with its cube."""
COMPILE_BYTES, FOLLOW_BYTES = 512 << 20, 64 << 20
"""Memory limits in bytes: to compile a grammar, and then to follow its outputs."""
TOKEN_BYTES, TOKENS_AHEAD = 4 << 10, 4096
"""Bytes of memory allowed per token of the outputs, and the tokens by which the limit is raised at once. A
JSON object uses 1.2 KB per token, since any of them may affect its end."""
FORM_BYTES = 128 << 20
"""Maximum memory of a compiled grammar, in bytes."""
COMPILE_S, FOLLOW_S = 20.0, 0.05
"""Limits of CPU time: to compile a grammar, and for one token or mask. Simple grammars take a thousandth."""
LATEST_S = 60.0
"""Limit of wall time to compile a grammar: a waiting process uses no CPU time."""
PROMPT_S, HURRIED_S = 0.5, 0.005
"""CPU time of compiling, and of one mask, after which the process gets a low priority."""
LOW_PRIORITY = 10
"""Nice value: a tenth of the engine's share of a busy core. With 19, a seventieth, refusing a hundred
requests for one slow regex took over two minutes beside four busy processes."""


def main() -> None:
    """Load xgrammar, then fork this process for each byte received."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        setup = json.loads(receive(control))
        gc.disable()  # imports create no garbage, and forks share pages that no collection touches
        maker = Maker.load(**setup)
        gc.freeze()
        gc.enable()
        control.sendall(framed(DONE))
        while control.recv(1):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                if os.fork() == 0:
                    control.close()
                    theirs.close()
                    try:
                        serve(ours, maker)
                    finally:
                        os._exit(0)
                socket.send_fds(control, [DONE], [theirs.fileno()])


class Maker(NamedTuple):
    """Shared by all grammars: a compiler over the model's vocabulary."""

    compiler: Any
    vocab: int
    eos: list[int]

    @classmethod
    def load(cls, tokenizer: str, vocab: int, eos: list[int]) -> "Maker":
        import tokenizers
        import xgrammar
        from transformers import PreTrainedTokenizerFast

        inner = tokenizers.Tokenizer.from_str(tokenizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for models without EOS: the grammar's end is the output's
            info = xgrammar.TokenizerInfo.from_huggingface(
                PreTrainedTokenizerFast(tokenizer_object=inner), vocab_size=vocab, stop_token_ids=eos or None
            )
        return cls(xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), vocab, eos)


def serve(engine: socket.socket, maker: Maker) -> None:
    """Compile the grammar, then follow its outputs until the engine closes the socket."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    base = _data_bytes()
    _limit_memory(base + COMPILE_BYTES)
    try:
        kind, source = json.loads(receive(engine))
        follower = Follower(_compile(maker, kind, source), maker)
        place = follower.place(())
        _check(kind, place, maker)
        allowance = Allowance(_checked_bytes(base) + FOLLOW_BYTES)
    except EOFError:
        return
    except Exception as error:  # of many types, including the C++ library's
        said = str(error).strip().splitlines() or [type(error).__name__]
        engine.sendall(framed(FAILED + WHERE.sub("", said[-1])[:300].encode()))
        return
    engine.sendall(framed(DONE + place))
    while True:
        try:
            frame = receive(engine)
        except (EOFError, ConnectionError):
            return
        for job in unpack(frame):
            allowance.cover(follower.num_tokens + len(job.taken or ()))
            if (answer := follower.answer(job)) is not None:
                engine.sendall(framed(answer))


class Follower:
    """Follow the outputs of one grammar, and their draft paths."""

    def __init__(self, compiled: Any, maker: Maker) -> None:
        import xgrammar

        self._compiled, self._maker = compiled, maker
        self._words_1W = xgrammar.allocate_token_bitmask(1, maker.vocab)
        self._outputs: dict[int, Walk] = {}
        self.num_tokens = 0
        """Total tokens of the outputs being followed."""
        self._is_hurried = True
        self._first = self._begin()

    def place(self, path: Path) -> bytes:
        """Return the mask at the beginning of an output."""
        return self._place(self._first, path)

    def answer(self, job: Job) -> bytes | None:
        """Advance an output by its accepted tokens, and return the masks of the requested paths."""
        if job.taken is None:
            if over := self._outputs.pop(job.output, None):
                self.num_tokens -= over.num_tokens
            return None
        if job.output not in self._outputs:
            self._outputs[job.output] = self._begin()
        walk = self._outputs[job.output]
        self.num_tokens += len(job.taken)
        start_s = time.thread_time()
        for token in job.taken:
            with Alarm(FOLLOW_S):
                walk.take(token)
        places = [self._place(walk, path) for path in job.paths]
        took_s = time.thread_time() - start_s
        if self._is_hurried and took_s > HURRIED_S * (len(places) + len(job.taken)):
            self._is_hurried = False
            os.nice(LOW_PRIORITY)
        return b"".join((COST.pack(took_s), *places))

    def _begin(self) -> "Walk":
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compiled, terminate_without_stop_token=not self._maker.eos)
        return Walk(matcher)

    def _place(self, walk: "Walk", path: Path) -> bytes:
        """Return the mask after a path; any token is allowed after a draft path outside the grammar."""
        with Alarm(FOLLOW_S):
            if not walk.go_to(path):
                return bytes([Kind.DEAD if not path else Kind.FREE])
            if walk.matcher.is_terminated():
                return bytes([Kind.OVER])
            if not walk.matcher.fill_next_token_bitmask(self._words_1W):
                return bytes([Kind.FREE])
            if not self._words_1W.any():
                return bytes([Kind.DEAD])
            words: bytes = self._words_1W.numpy().tobytes()
            return bytes([Kind.BOUND]) + words


class Walk:
    """One output's matcher, which may have advanced along a draft path."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.num_tokens = 0
        self._path: list[int] = []
        self._is_dead = False

    def take(self, token: int) -> None:
        """Advance by an accepted token. The grammar allows it unless it allowed none."""
        self.num_tokens += 1
        if self._path[:1] == [token]:
            # The matcher has already advanced past this token.
            self.matcher.rollback(len(self._path) - 1)
            self._path.clear()
        elif not (self.go_to(()) and self.matcher.accept_token(token)):
            self._is_dead = True

    def go_to(self, path: Sequence[int]) -> bool:
        """Advance the matcher along a path; return False if the grammar does not allow it."""
        if self._is_dead:
            return False
        shared = 0
        for own, other in zip(self._path, path, strict=False):
            if own != other:
                break
            shared += 1
        if shared < len(self._path):
            self.matcher.rollback(len(self._path) - shared)
            del self._path[shared:]
        for token in path[shared:]:
            if self.matcher.is_terminated() or not self.matcher.accept_token(token):
                return False
            self._path.append(token)
        return True


class Allowance:
    """Raise the process's memory limit with the tokens of the outputs it follows."""

    def __init__(self, base: int) -> None:
        self._base, self._covered = base, 0
        self.cover(1)

    def cover(self, num_tokens: int) -> None:
        """Allow memory for this many tokens. Never lowered: freed memory stays with the process."""
        if num_tokens > self._covered:
            self._covered = num_tokens + TOKENS_AHEAD
            _limit_memory(self._base + self._covered * TOKEN_BYTES)


class Alarm:
    """Kill the process if the block uses more CPU time than the limit."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def receive(sock: socket.socket) -> bytes:
    """Receive a frame."""
    (length,) = HEAD.unpack(_exactly(sock, HEAD.size))
    return _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _compile(maker: Maker, kind: str, source: str) -> Any:
    slow = threading.Timer(PROMPT_S, os.setpriority, (os.PRIO_PROCESS, os.getpid(), LOW_PRIORITY))
    slow.start()
    signal.setitimer(signal.ITIMER_REAL, LATEST_S)
    with Alarm(COMPILE_S):
        if kind in ("json_schema", "structural_tag") and _depth(source) > DEEPEST:
            raise ValueError(f"it nests more than {DEEPEST} levels")
        check_repetitions(kind, source)
        compiled = compiled_form(maker.compiler, kind, source)
    signal.setitimer(signal.ITIMER_REAL, 0)
    slow.cancel()
    return compiled


def compiled_form(compiler: Any, kind: str, source: str) -> Any:
    match kind:
        case "json_schema":
            return compiler.compile_json_schema(source, max_whitespace_cnt=BLANKS)
        case "json_object":
            return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=BLANKS)
        case "regex":
            return compiler.compile_regex(source)
        case "choice":
            return compiler.compile_grammar(_alternatives(json.loads(source)))
        case "grammar":
            return compiler.compile_grammar(source)
        case _:
            return compiler.compile_structural_tag(source)


def _check(kind: str, place: bytes, maker: Maker) -> None:
    """Refuse an unsatisfiable grammar: xgrammar compiles such a schema to the empty text."""
    words = place[1:]
    may_end = any(words[token // 8] >> token % 8 & 1 for token in maker.eos if words)
    if place[0] in (Kind.DEAD, Kind.OVER) or (kind == "json_schema" and may_end):
        raise ValueError("no text has this form")


def _depth(source: str) -> int:
    """Return how deep brackets nest, counting those within strings too, which is harmless."""
    depth = deepest = 0
    for sign in source:
        depth += (sign in "{[") - (sign in "}]")
        deepest = max(deepest, depth)
    return deepest


def _alternatives(texts: Sequence[str]) -> str:
    """Return a grammar of alternative texts; EBNF's escapes are JSON's, except for surrogate pairs."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _data_bytes() -> int:
    """Return the process's data size, as RLIMIT_DATA counts it."""
    found = re.search(r"^VmData:\s*(\d+) kB", File("/proc/self/status").read_text("ascii"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _checked_bytes(base: int) -> int:
    held = _data_bytes()
    if held - base > FORM_BYTES:
        raise ValueError(
            f"compiled it takes {held - base >> 20} MiB of memory and may take {FORM_BYTES >> 20}"
        )
    return held


def _limit_memory(most: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


if __name__ == "__main__":
    main()
