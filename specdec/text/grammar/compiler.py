"""A cache of compiled grammars over a model's vocabulary."""

import contextlib
import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from specdec.config.tenant import SOLE, Tenant
from specdec.errors import CLOSED, EngineError, RequestError
from specdec.text.grammar.guide import CompiledGrammar, Place, place_of
from specdec.text.grammar.places import Places
from specdec.text.grammar.template import Link, Template
from specdec.text.grammar.wire import DONE, Kind
from specdec.text.tokenizer import Tokenizer

PATIENCE_S = 20.0
"""Seconds to wait for a compile slot, and to compile. The process is killed after that."""
PLACES, MOST_PLACES = 3, 2
"""Grammars compiled concurrently, one core each: in total, and for one caller."""
KEPT = 16
"""Maximum cached grammars; running outputs keep theirs alive beyond it."""

Wanted = tuple[Tenant, str, str]
"""The cache's key: tenant, kind and source. Tenants do not share compiled grammars."""

SMALLER = "give a smaller one, or retry later"


class Grammars:
    """Compile and cache the grammars of requests. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos: Sequence[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, list(eos)
        self._places = Places(PLACES, MOST_PLACES)
        self._lock = threading.Lock()
        self._known: OrderedDict[Wanted, CompiledGrammar] = OrderedDict()
        """Ordered by last use."""
        self.template: Template | None = None
        self._is_closed = False

    def prepare(self) -> None:
        """Start the template process in a daemon thread; the first grammar reports a failure to start."""
        if self.template is None and not self._is_closed:
            threading.Thread(target=self._prepare, name="specdec-grammar", daemon=True).start()

    def _prepare(self) -> None:
        with contextlib.suppress(RequestError, EngineError, OSError):
            self._loaded().start()

    def release(self) -> None:
        """Stop processes that no output uses; the next grammar restarts them."""
        with self._lock:
            self._known.clear()
            if self.template:
                self.template.stop()

    def begin(self, kind: str, source: str, tenant: Tenant = SOLE) -> "Future[CompiledGrammar]":
        """Compile a grammar in a daemon thread."""
        compiling: Future[CompiledGrammar] = Future()
        key = tenant, kind, source
        if cached := self._find(key):
            compiling.set_result(cached)
        else:
            self._start(compiling, key)
        return compiling

    def _start(self, compiling: "Future[CompiledGrammar]", key: Wanted, *, shared: bool = True) -> None:
        threading.Thread(
            target=self._compile, args=(compiling, key, shared), name="specdec-grammar", daemon=True
        ).start()

    def _again(self, key: Wanted) -> "Future[CompiledGrammar]":
        """Recompile a grammar, uncached, for outputs whose process has died."""
        compiling: Future[CompiledGrammar] = Future()
        self._start(compiling, key, shared=False)
        return compiling

    def close(self) -> None:
        """Close all processes that no output uses, and refuse to compile."""
        with self._lock:
            self._is_closed = True
            self._known.clear()
            if self.template:
                self.template.close()

    def _find(self, key: Wanted) -> CompiledGrammar | None:
        with self._lock:
            grammar = self._known.get(key)
            if grammar is None or grammar.link.is_over:
                return None
            self._known.move_to_end(key)
            return grammar

    def _compile(self, compiling: "Future[CompiledGrammar]", key: Wanted, shared: bool) -> None:
        """Compile a grammar once a slot is free, unless the request was cancelled."""
        try:
            if compiling.set_running_or_notify_cancel():
                compiling.set_result(self._placed(key, shared=shared))
        except BaseException as error:
            compiling.set_exception(error)

    def _placed(self, key: Wanted, *, shared: bool) -> CompiledGrammar:
        tenant, kind, _ = key
        template = self._loaded()
        if not self._places.take(tenant.caller, PATIENCE_S):
            raise too_late(kind)
        try:
            # Another thread may have compiled it in the meantime.
            cached = self._find(key) if shared else None
            grammar = cached or self._compile_now(template, key)
        finally:
            self._places.give_back(tenant.caller)
        with self._lock:
            if shared and not self._is_closed:
                self._known[key] = grammar
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
        return grammar

    def _copied(self, template: Template, tenant: Tenant) -> Link:
        """Return a new process; evict cached grammars for it, the caller's own first."""
        with self._lock:
            keys = sorted(self._known, key=lambda key: key[0].caller != tenant.caller)
        for key in keys:
            if key[0].caller != tenant.caller and not template.places.has_share(tenant.caller):
                break  # evicting other callers' would not help
            with contextlib.suppress(TimeoutError):
                return template.copy(tenant.caller, 0.0)
            with self._lock:
                self._known.pop(key, None)
        return template.copy(tenant.caller, PATIENCE_S)

    def _compile_now(self, template: Template, key: Wanted) -> CompiledGrammar:
        tenant, kind, _ = key
        try:
            link = self._copied(template, tenant)
        except TimeoutError:
            raise too_late(kind) from None
        try:
            first = self._ask(link, key, time.monotonic() + PATIENCE_S)  # excludes the template's start
        except BaseException:
            link.close()  # the error may keep references; its slot is needed now
            raise
        width = -(-self._vocab // 32)
        return CompiledGrammar(link, first, width=width, compile_again=partial(self._again, key))

    def _ask(self, link: Link, key: Wanted, until_s: float) -> Place:
        """Start compiling a grammar in a process; return the mask of the first token."""
        _, kind, source = key
        link.send(json.dumps([kind, source]).encode())
        answer = b""
        while not answer and not link.is_over and (left_s := until_s - time.monotonic()) > 0:
            answer = next(link.frames(left_s), b"")
        if not answer:
            # It was killed by the system, or timed out.
            if link.is_over:
                raise _unfit(kind, "it takes too much time or memory to compile", SMALLER)
            raise too_late(kind)
        if answer[:1] != DONE:
            raise _unfit(kind, answer[1:].decode(errors="replace"))
        return place_of(Kind(answer[1]), answer[2:])

    def _loaded(self) -> Template:
        """Return the template, created on the first call; compiling a grammar starts it."""
        with self._lock:
            if self._is_closed:
                raise EngineError(CLOSED)
            if self.template is None:
                self.template = self._make_template()
                weakref.finalize(self, self.template.close)
            return self.template

    def _make_template(self) -> Template:
        if self._tokenizer is None:
            raise RequestError(
                "structured_outputs: there is no tokenizer.json, so tokens have no text; leave it out.",
                field="structured_outputs",
            )
        inner = self._tokenizer.inner
        size = max(inner.get_vocab().values(), default=-1) + 1
        eos = [token for token in self._eos if token < size]
        return Template(inner.to_str(), max(size, self._vocab), self._vocab, eos)


def too_late(kind: str) -> RequestError:
    return _unfit(kind, f"it was not compiled within {PATIENCE_S:g} s", SMALLER)


def _unfit(kind: str, reason: str, remedy: str = "give one that llguidance accepts") -> RequestError:
    return RequestError(f"structured_outputs.{kind}: {reason}; {remedy}.", field="structured_outputs")
