"""Run one engine on one batch of prompts and record drafts, acceptance and time."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from specdec.bench.acceptance.settings import SettingGroup
from specdec.bench.peers import TransformersPeer
from specdec.config.sampling import SamplingParams
from specdec.core.engine_core import EngineCore
from specdec.core.outputs import Delta
from specdec.core.request import Request
from specdec.core.stats import PHASES
from specdec.errors import SpecdecError
from specdec.setup.build import LoadedModel
from specdec.text.tokenizer import TextStream, Tokenizer, TokenTextCutter

LOOPS = 3
"""A looping text's last half repeats its period at least this often."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """One tokenized prompt."""

    category: str
    name: str
    ids: tuple[int, ...]

    def seed(self, seed: int, what: str = "") -> int:
        """Return the prompt's own seed, which does not depend on other prompts."""
        digest = hashlib.sha256(f"{seed} {self.category} {self.name} {what}".encode()).digest()
        return int.from_bytes(digest[:8]) >> 1


@dataclass(frozen=True, slots=True)
class AnswerLength:
    """Length limits of an answer."""

    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """The answer of one setting to one prompt, and the counts of its verify steps."""

    category: str
    name: str
    token_ids: tuple[int, ...]
    origins: tuple[int, ...]
    steps: int
    tokens: int
    """Tokens added by verify steps: all but the first, which prefill gives."""
    drafted: int
    reached: tuple[int, ...]
    """By depth: drafts with a token there whose parent was accepted."""
    followed: tuple[int, ...]
    """By depth: how many of those were accepted."""
    histogram: tuple[int, ...]
    """Steps by number of accepted draft tokens, from 0."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Build an answer from its JSON fields."""
        own: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**own)

    @property
    def is_looping(self) -> bool:
        return loops(self.token_ids)

    @property
    def length(self) -> float | None:
        """Return the acceptance length; None if prefill gave the whole answer."""
        return self.tokens / self.steps if self.steps else None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One batch of prompts in one setting."""

    answers: tuple[MeasuredAnswer, ...]
    seconds: float
    """From the first prompt's arrival to the last token of the batch."""
    reading_s: float
    """The part until every row had its first token."""
    phases: Mapping[str, float]
    """Seconds of decode steps by phase."""
    timed: int
    """The number of those steps, whatever rows took part."""

    @property
    def tokens_per_second(self) -> float:
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Parse the output of `as_json`."""
        answers = tuple(MeasuredAnswer.of(own) for own in fields["answers"])
        return cls(**{**fields, "answers": answers})


def loops(tokens: Sequence[int]) -> bool:
    """Return whether an output's last half repeats with a period of at most a third of its length.

    Such a text is easy to draft, and says nothing about a drafter.
    """
    last = tokens[len(tokens) // 2 :]
    return any(last[period:] == last[:-period] for period in range(1, len(last) // LOOPS + 1))


def params_for(
    asked: TokenizedPrompt, group: SettingGroup, length: AnswerLength, seed: int, what: str = ""
) -> SamplingParams:
    """Return a prompt's sampling parameters, equal in all settings of a group; `what` changes the seed."""
    return SamplingParams(
        max_tokens=length.max_tokens,
        temperature=group.temperature,
        ignore_eos=length.ignore_eos,
        seed=asked.seed(seed, what),
    )


def measure(
    model: LoadedModel, batch: Sequence[TokenizedPrompt], params: Sequence[SamplingParams]
) -> Measurement:
    """Step an engine in this thread until it has answered a batch, sharing nothing between requests."""
    core, loop = model.core, model.loop
    loop.disable_sharing()
    said: list[list[Delta | SpecdecError]] = [[] for _ in batch]
    requests = [
        _request(core, asked, own, inbox) for asked, own, inbox in zip(batch, params, said, strict=True)
    ]
    before, timed = dict(loop.counts.seconds), loop.counts.timed
    start_s, reading_s = time.perf_counter(), 0.0
    for request in requests:
        core.add_request(request)
    while core.has_work:
        core.step()
        if not reading_s and all(request.output_length for request in requests):
            reading_s = time.perf_counter() - start_s
    seconds = time.perf_counter() - start_s
    for error in (item for items in said for item in items if isinstance(item, SpecdecError)):
        raise error
    return Measurement(
        tuple(_answer(a, r, items) for a, r, items in zip(batch, requests, said, strict=True)),
        seconds=seconds,
        reading_s=reading_s,
        phases={phase: loop.counts.seconds[phase] - before[phase] for phase in PHASES},
        timed=loop.counts.timed - timed,
    )


def measure_peer(peer: TransformersPeer, asked: TokenizedPrompt, count: int) -> Measurement:
    """Decode greedily with `transformers`, as many tokens as the engine did for one prompt."""
    sample = peer.run([asked.ids], count - 1)
    assert sample.token_ids is not None
    answer = MeasuredAnswer(
        category=asked.category,
        name=asked.name,
        token_ids=sample.token_ids[0],
        origins=(0,) * count,
        steps=count - 1,
        tokens=count - 1,
        drafted=0,
        reached=(),
        followed=(),
        histogram=(count - 1,),
    )
    decoding_s = sum(sample.step_s)
    phases = {**dict.fromkeys(PHASES, 0.0), "verify": decoding_s}
    return Measurement((answer,), sample.prefill_s + decoding_s, sample.prefill_s, phases, count - 1)


def pieces(tokenizer: Tokenizer | None, answer: MeasuredAnswer) -> list[tuple[str, int]]:
    """Cut an answer's text by token, with each token's origin; without a tokenizer, return ids."""
    if tokenizer is None:
        return [(f"{t} ", origin) for t, origin in zip(answer.token_ids, answer.origins, strict=True)]
    stream, cutter, text = TextStream(tokenizer), TokenTextCutter(), ""
    for token, origin in zip(answer.token_ids, answer.origins, strict=True):
        text += stream.push(token)
        cutter.note(stream.length, origin)
    return [(piece.text, piece.origin) for piece in cutter.cut(text + stream.finish())]


def _request(
    core: EngineCore, asked: TokenizedPrompt, params: SamplingParams, said: list[Delta | SpecdecError]
) -> Request:
    assert params.seed is not None
    return core.new_request(asked.ids, params, seed=params.seed, emit=said.append)


def _answer(asked: TokenizedPrompt, request: Request, said: Sequence[Delta | SpecdecError]) -> MeasuredAnswer:
    counts = request.counts
    return MeasuredAnswer(
        category=asked.category,
        name=asked.name,
        token_ids=tuple(request.tokens[request.prompt_length :]),
        origins=tuple(origin for delta in said if isinstance(delta, Delta) for origin in delta.origins),
        steps=counts.steps,
        tokens=counts.tokens,
        drafted=counts.drafted,
        reached=tuple(counts.reached),
        followed=tuple(counts.followed),
        histogram=tuple(counts.histogram[i] for i in range(max(counts.histogram, default=0) + 1)),
    )
