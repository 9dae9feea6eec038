"""Grammars over a model's vocabulary, by xgrammar: which tokens may follow an output and a draft."""

import contextlib
import json
import re
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from specdec.errors import RequestError
from specdec.text import Tokenizer

CACHE_BYTES = 256 << 20
"""Kept of grammars that were compiled."""
BLANKS = 64
"""Between two parts of JSON at most: small models begin to indent and never stop."""
WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""What xgrammar's messages begin with: the time, and a line of its source."""
SLOW_S = 0.05
"""Of a processor, for one place of an output. Plain grammars take a thousandth of it."""
DEEPEST = 64
"""Levels of a schema: the time to compile them grows with their cube."""
PATIENCE_S = 20.0
"""For a form to be compiled. Nobody can stop the library: who asked stops waiting, what comes is kept."""
PLACES = 2
"""Forms that are compiled at once: each takes a processor from the engine."""


class Grammars:
    """Compiles what requests ask for, each form once. Any thread may call."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos: Sequence[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, list(eos)
        self._places = threading.BoundedSemaphore(PLACES)
        self._lock = threading.Lock()
        self._compiler: Any = None

    def guide(self, compiled: Any) -> "Guide":
        """Begin an output."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not self._eos)
        return Guide(matcher, xgrammar.allocate_token_bitmask(1, self._vocab))

    def compile(self, kind: str, source: str) -> Any:
        """Return the grammar of a form. It is a request's mistake if there is none."""
        compiling = self.begin(kind, source)
        try:
            return compiling.result(PATIENCE_S)
        except TimeoutError:
            compiling.cancel()
            raise too_late(kind) from None

    def begin(self, kind: str, source: str) -> "Future[Any]":
        """Have a form compiled, in a thread that nobody waits for when the process ends."""
        compiling: Future[Any] = Future()
        work = (compiling, kind, source)
        threading.Thread(target=self._compile, args=work, name="specdec-grammar", daemon=True).start()
        return compiling

    def _compile(self, compiling: "Future[Any]", kind: str, source: str) -> None:
        """Compile a form when there is a place, unless nobody waits for it any more."""
        placed = self._places.acquire(timeout=PATIENCE_S)
        try:
            if compiling.set_running_or_notify_cancel():
                compiling.set_result(self._compile_now(kind, source, placed=placed))
        except BaseException as error:
            compiling.set_exception(error)
        finally:
            if placed:
                self._places.release()

    def _compile_now(self, kind: str, source: str, *, placed: bool) -> Any:
        if not placed:
            raise too_late(kind)
        if kind in ("json_schema", "structural_tag") and _depth(source) > DEEPEST:
            raise _unfit(kind, f"it nests more than {DEEPEST} levels")
        with self._lock:
            compiler = self._compiler = self._compiler or self._make_compiler()
        try:
            compiled = _compiled(compiler, kind, source)
        except Exception as error:  # of many kinds, the C++ library's among them
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise _unfit(kind, WHERE.sub("", said[-1])[:300]) from None
        guide = self.guide(compiled)
        # A schema that nothing fits comes out as one that fits the empty text.
        if guide.is_dead or (kind == "json_schema" and guide.may_end(self._eos)):
            raise _unfit(kind, "no text has this form")
        return compiled

    def _make_compiler(self) -> Any:
        if self._tokenizer is None:
            raise RequestError(
                "structured_outputs: there is no tokenizer.json, so tokens have no text; leave it out.",
                field="structured_outputs",
            )
        try:
            import xgrammar
        except ImportError:
            raise RequestError(
                "structured_outputs: forms of output need xgrammar, which is not installed here; "
                "run: pip install 'specdec[structured]'.",
                field="structured_outputs",
            ) from None
        from transformers import PreTrainedTokenizerFast

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a model without an end: there a form's own end is one
            info = xgrammar.TokenizerInfo.from_huggingface(
                PreTrainedTokenizerFast(tokenizer_object=self._tokenizer.inner),
                vocab_size=self._vocab,
                stop_token_ids=self._eos or None,
            )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)


class Guide:
    """Follows one output through its grammar, and drafts ahead of it."""

    def __init__(self, matcher: Any, words_1W: Tensor) -> None:
        self._matcher, self._words_1W = matcher, words_1W
        self._path: list[int] = []
        """Drafted tokens that the matcher has taken and must give back."""
        self._known: dict[tuple[int, ...], Tensor | None] = {}
        """What may follow each path of this step: a draft asks for it, and then its verification."""

        self.fault: str | None = None

    @property
    def is_dead(self) -> bool:
        """Tell whether nothing may follow, and here is no end."""
        self._matcher.fill_next_token_bitmask(self._words_1W)
        return not self._words_1W.any()

    def may_end(self, eos: Sequence[int]) -> bool:
        """Tell whether the output may end here, at one of these tokens or without any."""
        self._matcher.fill_next_token_bitmask(self._words_1W)
        words = self._words_1W[0].tolist()
        return self._matcher.is_terminated() or any(words[token // 32] >> token % 32 & 1 for token in eos)

    @property
    def is_over(self) -> bool:
        if self.fault:
            return False
        self._go_to(())
        over: bool = self._matcher.is_terminated()
        return over

    def words(self, path: Sequence[int]) -> Tensor | None:
        key = tuple(path)
        if key not in self._known:
            with self._in_time():
                self._known[key] = self._find(key)
        return self._known[key]

    def observe(self, token: int) -> bool:
        """Take an accepted token. It is one that the form allows unless that allowed none."""
        self._known.clear()
        with self._in_time():
            if not self.fault and not (self._go_to(()) and self._matcher.accept_token(token)):
                self.fault = "no text of the form goes on from here; give one that can always end"
        return True

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Give up a grammar that takes ever longer to follow, as ambiguous ones do: others wait for it."""
        start_s = time.thread_time()
        yield
        if time.thread_time() - start_s > SLOW_S:
            self.fault = "its grammar takes too long to follow; write one that reads a text in one way only"

    def _find(self, path: tuple[int, ...]) -> Tensor | None:
        """Where nothing may follow, everything may: what is chosen there will be refused."""
        if not self._go_to(path) or self._matcher.is_terminated():
            return None
        bounds = self._matcher.fill_next_token_bitmask(self._words_1W)
        return self._words_1W[0].clone() if bounds and self._words_1W.any() else None

    def _go_to(self, path: tuple[int, ...]) -> bool:
        """Bring the matcher behind a path; False: the grammar does not go there."""
        shared = 0
        for own, other in zip(self._path, path, strict=False):
            if own != other:
                break
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
            del self._path[shared:]
        for token in path[shared:]:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
            self._path.append(token)
        return True


def _compiled(compiler: Any, kind: str, source: str) -> Any:
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


def _depth(source: str) -> int:
    """Return how deep brackets nest; those within strings count too, which is no harm."""
    depth = deepest = 0
    for sign in source:
        depth += (sign in "{[") - (sign in "}]")
        deepest = max(deepest, depth)
    return deepest


def _alternatives(texts: Sequence[str]) -> str:
    """Write a grammar of some texts; JSON's escapes are EBNF's, but for those of pairs of surrogates."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def too_late(kind: str) -> RequestError:
    late = f"it was not compiled within {PATIENCE_S:g} s"
    return _unfit(kind, late, "give a smaller one, or ask for it again later")


def _unfit(kind: str, why: str, instead: str = "give one that xgrammar can read") -> RequestError:
    return RequestError(f"structured_outputs.{kind}: {why}; {instead}.", field="structured_outputs")
