"""Grammars over a model's vocabulary: which forms of output are known, and how others come to be."""

import importlib.util
import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from specdec.errors import CLOSED, EngineError, RequestError
from specdec.grammars.guide import Form, Guide, place_of
from specdec.grammars.template import Template
from specdec.grammars.wire import DONE, Kind
from specdec.text import Tokenizer

PATIENCE_S = 20.0
"""For a place to compile a form at, and for it to be compiled. Its process is ended after that."""
PLACES = 2
"""Forms that are compiled at once: each takes a processor."""
KEPT = 16
"""Forms that are kept for later requests, though no output follows them."""

SMALLER = "give a smaller one, or ask for it again later"


class Grammars:
    """Compiles what requests ask for, each form once while it is kept. Any thread may call."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos: Sequence[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, list(eos)
        self._places = threading.BoundedSemaphore(PLACES)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], Form] = OrderedDict()
        """Those asked for last stand last."""
        self.template: Template | None = None
        self._is_closed = False

    def guide(self, form: Form) -> Guide:
        """Begin an output."""
        return Guide(form)

    def compile(self, kind: str, source: str) -> Form:
        """Return the grammar of a form. It is a request's mistake if there is none."""
        return self.begin(kind, source).result()

    def begin(self, kind: str, source: str) -> "Future[Form]":
        """Have a form compiled, in a thread that nothing waits for when the process ends."""
        compiling: Future[Form] = Future()
        if known := self._find(kind, source):
            compiling.set_result(known)
        else:
            self._start(compiling, kind, source)
        return compiling

    def _start(self, compiling: "Future[Form]", kind: str, source: str, *, shared: bool = True) -> None:
        threading.Thread(
            target=self._compile, args=(compiling, kind, source, shared), name="specdec-grammar", daemon=True
        ).start()

    def _again(self, kind: str, source: str) -> "Future[Form]":
        """Compile a form once more for outputs whose process has ended, and for them alone."""
        compiling: Future[Form] = Future()
        self._start(compiling, kind, source, shared=False)
        return compiling

    def close(self) -> None:
        """End all processes that no output needs, and compile nothing any more."""
        with self._lock:
            self._is_closed = True
            self._known.clear()
            if self.template:
                self.template.close()

    def _find(self, kind: str, source: str) -> Form | None:
        with self._lock:
            form = self._known.get((kind, source))
            if form is None or form.link.is_over:
                return None
            self._known.move_to_end((kind, source))
            return form

    def _compile(self, compiling: "Future[Form]", kind: str, source: str, shared: bool) -> None:
        """Compile a form when there is a place, unless its caller has gone."""
        try:
            if compiling.set_running_or_notify_cancel():
                compiling.set_result(self._placed(kind, source, shared=shared))
        except BaseException as error:
            compiling.set_exception(error)

    def _placed(self, kind: str, source: str, *, shared: bool) -> Form:
        template = self._loaded()
        if not self._places.acquire(timeout=PATIENCE_S):
            raise too_late(kind)
        try:
            # Another may have compiled it meanwhile.
            known = self._find(kind, source) if shared else None
            form = known or self._compile_now(template, kind, source)
        finally:
            self._places.release()
        with self._lock:
            if shared and not self._is_closed:
                self._known[kind, source] = form
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
        return form

    def _compile_now(self, template: Template, kind: str, source: str) -> Form:
        until_s = time.monotonic() + PATIENCE_S
        try:
            link = template.copy(PATIENCE_S)
        except TimeoutError:
            raise too_late(kind) from None
        link.send(json.dumps([kind, source]).encode())
        answer = b""
        while not answer and not link.is_over and (left_s := until_s - time.monotonic()) > 0:
            answer = next(link.frames(left_s), b"")
        if not answer:
            # It was ended by the system, or takes too long: what it does is of no use any more.
            ended = link.is_over
            link.close()
            raise (
                _unfit(kind, "it takes too much time or memory to compile", SMALLER)
                if ended
                else too_late(kind)
            )
        if answer[:1] != DONE:
            raise _unfit(kind, answer[1:].decode(errors="replace"))
        first = place_of(Kind(answer[1]), answer[2:])
        return Form(
            link, first, width=-(-self._vocab // 32), compile_again=partial(self._again, kind, source)
        )

    def _loaded(self) -> Template:
        """Return the template; the first call makes it, and it is started when a form is compiled."""
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
        if importlib.util.find_spec("xgrammar") is None:
            raise RequestError(
                "structured_outputs: forms of output need xgrammar, which is not installed here; "
                "run: pip install 'specdec[structured]'.",
                field="structured_outputs",
            )
        return Template(self._tokenizer.inner.to_str(), self._vocab, self._eos)


def too_late(kind: str) -> RequestError:
    return _unfit(kind, f"it was not compiled within {PATIENCE_S:g} s", SMALLER)


def _unfit(kind: str, why: str, instead: str = "give one that xgrammar can read") -> RequestError:
    return RequestError(f"structured_outputs.{kind}: {why}; {instead}.", field="structured_outputs")
