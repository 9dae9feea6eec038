"""Limit an output's thinking, and start its grammar after it."""

from collections.abc import Collection, Mapping
from functools import cached_property

from torch import Tensor

from specdec.config.thinking import ThinkingSpan
from specdec.errors import RequestError
from specdec.text.answers.thinking import OVER, ThinkingPhase, ThinkingState, ThinkingTrack, overruns
from specdec.text.tokenizer import Tokenizer
from specdec.verify.limits import TokenLimit, all_but, set_of, words_of

Path = tuple[int, ...]


class ThinkingMarks:
    """Thinking markers as a model's tokens; shared by all requests."""

    def __init__(self, start: str, end: str, *, tokenizer: Tokenizer | None, vocab: int) -> None:
        if tokenizer is None:
            raise RequestError(
                "thinking: the model's folder has no tokenizer.json, so its markers are no tokens; leave it "
                "out.",
                field="thinking",
            )
        self.start, self.end, self.vocab = start, end, vocab
        self.tokenizer = tokenizer
        opening = tokenizer.encode(start, special=False)
        self.opening = opening[0] if len(opening) == 1 and tokenizer.spell(opening[0]) == start else None
        """The start marker's token, if it is a single one."""
        self.ending = tokenizer.encode(end, special=False)
        while end in "".join(map(tokenizer.spell, self.ending[1:])):  # a leading blank from SentencePiece
            self.ending = self.ending[1:]
        if end not in "".join(map(tokenizer.spell, self.ending)):
            raise RequestError(
                f"thinking: the tokenizer cannot encode the end marker {end!r}; give one that they can, "
                "or leave thinking out.",
                field="thinking",
            )

        self.continuations = self._continuations()
        """Next token of the end marker, by the part already generated."""

    def _continuations(self) -> dict[str, int]:
        """Return them from the marker's own tokens, and re-encode the rest after any other split."""
        spelled = [self.tokenizer.spell(token) for token in self.ending]
        at, tokens = -"".join(spelled).index(self.end), dict[str, int]()
        for token, text in zip(self.ending, spelled, strict=True):
            tokens.setdefault(self.end[: max(at, 0)], token)
            at += len(text)
        for at in range(1, len(self.end)):
            rest = self.tokenizer.encode(self.end[at:], special=False)
            text = self.tokenizer.spell(rest[0]) if rest else ""
            fits = text and self.end.startswith(text, at)
            tokens.setdefault(self.end[:at], rest[0] if fits else self.ending[0])
        return {written: tokens[written] for written in sorted(tokens, key=len, reverse=True)}

    @cached_property
    def overruns(self) -> Mapping[str, Collection[int]]:
        """Tokens that would start the structured text before the grammar sees it."""
        return overruns(self.end, self.tokenizer.spell_all(self.vocab))


class ThinkingRule:
    """Thinking settings shared by the outputs of one request."""

    def __init__(
        self, span: ThinkingSpan, marks: ThinkingMarks, ends: Collection[int], *, has_grammar: bool
    ) -> None:
        vocab, runs = marks.vocab, marks.overruns if has_grammar else {}
        self.track = ThinkingTrack(marks.start, marks.end, marks.tokenizer.spell, opened=span.opened)
        self.budget = span.budget
        self.start = marks.opening
        self.start_bits = set_of([] if self.start is None else [self.start], vocab)
        self.end_bits = {written: set_of([token], vocab) for written, token in marks.continuations.items()}
        """Allowed tokens once the budget is spent, by the generated part of the end marker, longest first."""
        self.thinking_bits = all_but({*ends, *runs.get("", ())}, vocab)
        """Allowed tokens within thinking before a grammar."""
        self.begun_bits = {written: all_but(tokens, vocab) for written, tokens in runs.items() if written}
        """Allowed tokens after a part of the end marker, before a grammar."""
        if self.budget is not None and any(
            token in tokens for tokens in runs.values() for token in marks.continuations.values()
        ):
            raise RequestError(
                f"thinking: its end, {marks.end!r}, may overlap itself, so that a budget cannot write it "
                "anywhere before a structured output; give another end, or leave the budget out.",
                field="thinking",
            )

    def begin(self, grammar: TokenLimit | None) -> "ThinkingLimit":
        """Return one choice's limit, whose grammar holds from the end of its thinking."""
        return ThinkingLimit(self, grammar)

    def thinking_words(self, tail: str) -> Tensor:
        """Return allowed tokens within thinking, such that the grammar sees all text after the end marker."""
        words_W = words_of(self.thinking_bits)
        for written, bits in self.begun_bits.items():
            if tail.endswith(written):
                words_W = words_W & words_of(bits)
        return words_W

    def ending_words(self, tail: str) -> Tensor:
        """Return the end marker's next token, continuing a part already generated."""
        return next(words_of(bits) for written, bits in self.end_bits.items() if tail.endswith(written))


class ThinkingLimit:
    """Leaves thinking free until its budget is spent, then forces the end marker; then the grammar holds.

    With a grammar, the output cannot end within thinking, no token may span the end marker and the text after
    it, and an output that may still start thinking begins with the start marker or the grammar.
    """

    def __init__(self, terms: ThinkingRule, grammar: TokenLimit | None) -> None:
        self._terms, self._grammar = terms, grammar
        first, no_start = terms.track.first, grammar is not None and terms.start is None
        self._place = OVER if first.phase == ThinkingPhase.MAY_BEGIN and no_start else first
        self.field = grammar.field if grammar else "thinking"

    @property
    def fault(self) -> str | None:
        return self._grammar.fault if self._grammar else None

    @property
    def is_over(self) -> bool:
        return self._grammar is not None and self._place.phase == ThinkingPhase.OVER and self._grammar.is_over

    @property
    def is_slow(self) -> bool:
        return self._grammar is not None and self._grammar.is_slow

    def ask(self, paths: Collection[Path]) -> None:
        if self._grammar:
            self._grammar.ask([rest for path in paths if (rest := self._follow(path)[1]) is not None])

    def wait(self, until_s: float, *, always: bool) -> None:
        if self._grammar:
            self._grammar.wait(until_s, always=always)

    def knows(self, path: Path) -> bool:
        rest = self._follow(path)[1] if self._grammar else None
        return self._grammar is None or rest is None or self._grammar.knows(rest)

    def words(self, path: Path) -> Tensor | None:
        state, rest = self._follow(path)
        terms, grammar = self._terms, self._grammar
        if state.phase == ThinkingPhase.THINKING:
            tail = "".join(state.tail)
            if terms.budget is not None and state.spent >= terms.budget:
                return terms.ending_words(tail)
            return terms.thinking_words(tail) if grammar else None
        words_W = grammar.words(rest) if grammar and rest is not None else None
        if state.phase == ThinkingPhase.MAY_BEGIN and words_W is not None:
            return words_W | words_of(terms.start_bits)
        return words_W

    def observe(self, token: int) -> bool:
        before, self._place = self._place, self._next(self._place, token)
        if self._grammar is None:
            return self._place.phase != ThinkingPhase.OVER
        if self._place.phase == ThinkingPhase.OVER and before.phase != ThinkingPhase.THINKING:
            return self._grammar.observe(token)
        return True

    def _next(self, state: ThinkingState, token: int) -> ThinkingState:
        if self._grammar and state.phase == ThinkingPhase.MAY_BEGIN:
            return ThinkingState(ThinkingPhase.THINKING) if token == self._terms.start else OVER
        return self._terms.track.after(state, token)

    def _follow(self, path: Path) -> tuple[ThinkingState, Path | None]:
        """Return a path's phase, and the part the grammar judges; None: it is all thinking."""
        state = self._place
        for at, token in enumerate(path):
            before, state = state, self._next(state, token)
            if state.phase == ThinkingPhase.OVER:
                return state, path[at + (before.phase == ThinkingPhase.THINKING) :]
        return state, None if state.phase == ThinkingPhase.THINKING else ()
