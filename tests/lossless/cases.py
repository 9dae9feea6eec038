"""Requests with every sampling feature, their plain decoding outputs, and engines that draft."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from specdec import Completion, SamplingParams, SpecEngine, Structure, ThinkingSpan
from specdec.core.batch import StepReport
from specdec.core.outputs import TokenLogprob
from specdec.core.scheduler import StepPlan
from specdec.models.feed_forward import MoE
from specdec.models.spec import NetworkSpec
from specdec.state_slots.layout import Layout
from tests.draft.oracle import Oracle
from tests.models.agreeing import END, VOCAB
from tests.tolerances import FLOAT64_LOGITS

LONGEST = 64
FEW = 4
EXACT = 1e-9
"""Tolerance to plain decoding in float64, for models without a float32 router."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "chain": {"num_steps": 4, "topk": 1, "num_draft_tokens": 5},
    "tree": {"num_steps": 4, "topk": 3, "num_draft_tokens": 11},
}
ENDING = {END: 2.0}
"""Makes the end token likelier, so that some outputs end within a draft."""
BAD_WORDS = ["aa", "bb", "ca", "dab", "abcd"]
PAIRS = Structure(regex=r"([a-f]{2}[0-9]?\.){2,}")
FEATURES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "greedy": [{"temperature": 0.0, "ignore_eos": True, "max_tokens": 20}, {"temperature": 0.0}],
    "temperature": [{"temperature": 0.7}, {"temperature": 1.3, "n": 2}],
    "filters": [
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 8, "min_p": 0.05},
    ],
    "penalties": [
        # Few tokens, each less likely once sampled: the next token depends on the last ones, drafted or not.
        {
            "temperature": 0.0,
            "repetition_penalty": 1.2,
            "frequency_penalty": 2.0,
            "logit_bias": dict.fromkeys((1, 2, 3), 7.0),
        },
        {"temperature": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.6, "top_p": 0.8},
    ],
    "logit_bias": [
        {"temperature": 1.0, "ignore_eos": True, "logit_bias": {3: 3.0, 5: -100.0}},
        {"temperature": 0.7, "logit_bias": ENDING},
    ],
    "logprobs": [{"temperature": 0.0, "logprobs": 0}, {"temperature": 0.7, "logprobs": 3}],
    "stop": [{"temperature": 0.0}, {"temperature": 0.7, "ignore_eos": True}],
    "structured": [
        {"temperature": 0.7, "structured_outputs": PAIRS},
        {"temperature": 0.0, "structured_outputs": Structure(choice=["abcdefgh", "abcxyz123", "zz"])},
        {"temperature": 1.3, "min_tokens": 6, "logit_bias": {END: 6.0}},
        {"temperature": 0.7, "thinking": ThinkingSpan(end="a", budget=3), "structured_outputs": PAIRS},
    ],
    "words": [
        {"temperature": 0.0, "allowed_token_ids": [*range(0, END, 3)], "ignore_eos": True},
        # Pairs of likely letters: the tokens forbidden at a node depend on its path.
        {"temperature": 0.7, "logit_bias": dict.fromkeys(range(4), 6.0), "bad_words": BAD_WORDS},
        # Thinking ended by its budget, by two tokens, in the middle of drafts.
        {"temperature": 0.7, "thinking": ThinkingSpan(end="9.", budget=5)},
    ],
}
"""Keyed by the values of the capability table's sampling axis."""
if find_spec("llguidance") is None:  # as on a bare GPU machine
    FEATURES = {**FEATURES, "structured": [own for own in FEATURES["structured"] if "min_tokens" in own]}


@dataclass(frozen=True, slots=True)
class Case:
    """One request and its plain decoding output: a completion per choice."""

    feature: str
    prompt: Sequence[int]
    params: SamplingParams
    said: Sequence[Completion]

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return [(*self.prompt, *own.token_ids) for own in self.said]


def plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the baseline engine: no drafts, no prefix cache."""
    own = {"draft": "none", "prefix_cache": False, "max_model_len": LONGEST}
    return {"dtype": "float64", **fields, **own}


def plain_cases(folder: Path, **fields: Any) -> list[Case]:
    """Draw requests, each answered alone by a plain engine, its prompt in one window."""
    rng, cases = Random(2), []
    with SpecEngine(folder, **plain(fields)) as engine:
        for feature, settings in FEATURES.items():
            for setting in settings:
                prompt = [rng.randrange(END) for _ in range(rng.choice([1, 4, 11, 19, 40]))]
                params = SamplingParams(**{"max_tokens": 12, "seed": rng.getrandbits(40), **setting})
                said = engine.generate([prompt], params)
                if feature == "stop":
                    # Two letters from the middle of the text; they may occur earlier, which is part of the
                    # test.
                    text = said[0].text
                    params = params.model_copy(update={"stop": [text[8:10] or text[:2] or "@", "@@"]})
                    said = engine.generate([prompt], params)
                cases.append(Case(feature, prompt, params, said))
    return cases


def in_brief(folder: Path, cases: Sequence[Case], **fields: Any) -> list[Case]:
    """Return the same cases with few tokens."""
    brief = []
    with SpecEngine(folder, **plain(fields)) as engine:
        for case in cases:
            params = case.params.model_copy(update={"max_tokens": max(FEW, case.params.min_tokens)})
            brief.append(replace(case, params=params, said=engine.generate([case.prompt], params)))
    return brief


@dataclass(slots=True)
class Seen:
    """Counters of an engine's steps."""

    mixed: int = 0
    """Steps with prefill beside a row that verified a draft."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Drafts by accepted depth: none, part or all."""
    winding: int = 0
    """Drafts whose accepted path left the first branch."""
    overshot: int = 0
    """Steps that verified more than their request used: its output ended within the accepted path."""


@contextmanager
def drafting_engine(
    folder: Path, drafter: str, cases: Sequence[Case], *, rate: float = 0.7, **fields: Any
) -> Iterator[tuple[SpecEngine, Seen]]:
    """Open an engine, possibly with the oracle as drafter, and count its steps."""
    fields = {"dtype": "float64", "max_model_len": LONGEST, "adaptive": False, **fields}
    if drafter == "none":
        fields = {k: v for k, v in fields.items() if k not in {"adaptive", *SHAPES["chain"]}}
    with SpecEngine(folder, **{"draft": "ngram" if drafter == "oracle" else drafter, **fields}) as engine:
        speculation = engine.model.loop.speculation
        if drafter == "oracle":
            texts = [text for case in cases for text in case.texts]
            speculation.drafters.clear()
            speculation.add_drafter(Oracle(texts, vocab=VOCAB, rate=rate))
        seen = Seen()
        _watch(engine, seen)
        yield engine, seen
        engine.flush()
        arena = engine.model.loop.arena
        arena.check_integrity()
        assert arena.usage().free_slabs == arena.usage().slabs, "what was borrowed has gone back"


def _watch(engine: SpecEngine, seen: Seen) -> None:
    def note(report: StepReport) -> None:
        rows, paths = report.result.rows, report.result.paths
        for row, path, taken in zip(rows, paths, report.taken, strict=True):
            seen.overshot += taken < len(path.emitted)
            if row.is_drafted and report.result.ahead is None:
                depth, reached = max(row.tree.depths), len(path.nodes) - 1
                seen.outcomes["none" if not reached else "all" if reached == depth else "part"] += 1
                seen.winding += path.nodes[-1] != reached
        kinds = {(row.is_decode, row.is_drafted) for row in rows}
        seen.mixed += (True, True) in kinds and (False, False) in kinds

    engine.model.loop.observers.append(note)


def preempt_each(engine: SpecEngine) -> None:
    """Preempt every request once, after its first tokens."""
    scheduler = engine.model.loop.scheduler
    schedule = scheduler.schedule

    def preempt_and_schedule() -> StepPlan:
        for request in reversed(scheduler.running):
            if request.preemptions == 0 and request.output_length > 0:
                scheduler.preempt(request)
        return schedule()

    scheduler.schedule = preempt_and_schedule  # type: ignore[method-assign]


def memory_for(layout: Layout, sequences: int, blocks: int) -> int:
    """Return the bytes of this many states and blocks, and of the dummy slab."""
    of_blocks = -(-blocks // layout.blocks_per_slab) if layout.kv else 1  # space for drafts
    slabs = 1 + sequences * layout.states_per_slab + of_blocks
    return slabs * layout.slab_bytes


def generate(engine: SpecEngine, cases: Sequence[Case]) -> list[list[Completion]]:
    """Complete all requests together; return each one's choices."""
    done = engine.generate([case.prompt for case in cases], [case.params for case in cases])
    found, rest = [], iter(done)
    for case in cases:
        found.append([next(rest) for _ in range(case.params.n)])
    return found


def differences(
    cases: Sequence[Case], found: Sequence[Sequence[Completion]], *, within: float = EXACT
) -> list[str]:
    """List the differences from plain decoding: tokens, text, finish reason, log-probabilities."""
    wrong = []
    for i, (case, own) in enumerate(zip(cases, found, strict=True)):
        for expected, got in zip(case.said, own, strict=True):
            for name in ("token_ids", "text", "finish_reason"):
                if getattr(expected, name) != getattr(got, name):
                    wrong.append(f"{case.feature} {i}: {name}")
            if not _logprobs_agree(expected, got, within):
                wrong.append(f"{case.feature} {i}: logprobs")
    return wrong


def rounding(network: NetworkSpec, exact: float = EXACT) -> float:
    """Return the tolerance to plain decoding in float64: `exact`, unless a router rounds.

    A sigmoid router computes in float32 whatever the model's dtype, unless it is a narrow one.
    """
    experts = [layer.ffn for layer in network.layers if isinstance(layer.ffn, MoE)]
    wide = any(expert.router == "sigmoid" and not expert.narrow_router for expert in experts)
    return max(exact, FLOAT64_LOGITS) if wide else exact


def _logprobs_agree(expected: Completion, got: Completion, within: float) -> bool:
    if expected.logprobs is None or got.logprobs is None:
        return expected.logprobs is got.logprobs
    if len(expected.logprobs) != len(got.logprobs):
        return False
    return all(
        [token for token, _ in a] == [token for token, _ in b]
        and all(abs(p - q) <= within for (_, p), (_, q) in zip(a, b, strict=True))
        for a, b in zip(_flat(expected.logprobs), _flat(got.logprobs), strict=True)
    )


def _flat(logprobs: Sequence[TokenLogprob]) -> list[list[tuple[int, float]]]:
    return [[(logprob.token_id, logprob.logprob), *logprob.top] for logprob in logprobs]
