"""Grammars over a model's vocabulary, by xgrammar: which tokens may follow an output and a draft."""

import json
import threading
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from specdec.errors import RequestError
from specdec.text import Tokenizer

CACHE_BYTES = 256 << 20
"""Kept of grammars that were compiled."""
BLANKS = 64
"""Between two parts of JSON at most: small models begin to indent and never stop."""
LONGEST = 128 << 10
"""Characters of a form: a longer one takes minutes to compile."""


class Grammars:
    """Compiles what requests ask for, each form once. Any thread may call."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos: Sequence[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, list(eos)
        self._lock = threading.Lock()
        self._compiler: Any = None
        self.compile = lru_cache(maxsize=1024)(self._compile)

    def guide(self, compiled: Any) -> "Guide":
        """Begin an output."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not self._eos)
        return Guide(matcher, xgrammar.allocate_token_bitmask(1, self._vocab))

    def _compile(self, kind: str, source: str) -> Any:
        """Return the grammar of a form. It is a request's mistake if there is none."""
        if len(source) > LONGEST:
            raise _unfit(kind, f"it has {len(source):,} characters and may have {LONGEST:,}")
        with self._lock:
            compiler = self._compiler = self._compiler or self._make_compiler()
            try:
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
            except Exception as error:  # of many kinds, the C++ library's among them
                raise _unfit(kind, str(error).strip().splitlines()[-1][:300]) from None

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

    @property
    def is_over(self) -> bool:
        self._go_to(())
        over: bool = self._matcher.is_terminated()
        return over

    def words(self, path: Sequence[int]) -> Tensor | None:
        key = tuple(path)
        if key not in self._known:
            self._known[key] = self._find(key)
        return self._known[key]

    def observe(self, token: int) -> bool:
        """Take an accepted token. One that the grammar had not allowed ends its bounds, and the output."""
        self._go_to(())
        self._known.clear()
        taken: bool = self._matcher.accept_token(token)
        assert taken, f"token {token} was chosen and is none that the grammar allows"
        return True

    def _find(self, path: tuple[int, ...]) -> Tensor | None:
        if not self._go_to(path) or self._matcher.is_terminated():
            return None
        bounds = self._matcher.fill_next_token_bitmask(self._words_1W)
        return self._words_1W[0].clone() if bounds else None

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


def _alternatives(texts: Sequence[str]) -> str:
    """Write a grammar of some texts; JSON's escapes are EBNF's."""
    return "root ::= " + " | ".join(json.dumps(text) for text in texts)


def _unfit(kind: str, why: str) -> RequestError:
    return RequestError(
        f"structured_outputs.{kind}: {why}; give one that xgrammar can read.", field="structured_outputs"
    )
