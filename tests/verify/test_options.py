"""A step's work for sampling options: little per row, however many entries each option has."""

import random
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from specdec.config.sampling import SamplingParams
from specdec.kernels.table import load_kernels
from specdec.verify.limits import BadWords
from specdec.verify.logprobs import TopTokens, logprobs_of
from specdec.verify.output_counts import OutputCounts
from specdec.verify.sampler import SamplingNode, TokenSampler, choose

VOCAB = 2048
KERNELS = load_kernels("cpu")
MOST_BYTECODES, MOST_CALLS = 800, 6
"""Limits per row. Measured 500 and 5; 11,000 and 17 if each entry and row is gathered separately."""

TOKENS = st.integers(0, 5)


class Calls(TorchFunctionMode):
    """Counter of torch calls."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def bytecodes(nodes: list[SamplingNode], logits_NV: torch.Tensor) -> int:
    """Count the bytecodes executed while these nodes choose."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        choose(logits_NV, nodes, KERNELS)
    finally:
        sys.settrace(before)
    return count


def make_nodes(rows: int) -> list[SamplingNode]:
    rng = random.Random(1)
    params = SamplingParams(
        temperature=1.0,
        logit_bias={token: 0.1 for token in range(1023)},
        logprobs=20,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
    )
    prompt = [rng.randrange(VOCAB) for _ in range(1000)]
    words = {tuple(rng.randrange(VOCAB) for _ in range(length % 5 + 1)) for length in range(64)}
    shared = BadWords(words, VOCAB)._bits
    nodes = []
    for seed in range(rows):
        banned = BadWords(words, VOCAB)
        banned._bits = shared
        chooser = TokenSampler(params, seed=seed, prompt=prompt, vocab=VOCAB, limits=[banned])
        nodes.append(SamplingNode(chooser, 1000))
    return nodes


def test_a_row_with_every_option_costs_a_step_little() -> None:
    few, many, logits_NV = make_nodes(4), make_nodes(36), torch.randn(36, VOCAB)
    choose(logits_NV, many, KERNELS)  # fill caches
    assert bytecodes(many, logits_NV) - bytecodes(few, logits_NV[:4]) < 32 * MOST_BYTECODES
    counts = []
    for nodes in (few, many):
        with Calls() as calls:
            choose(logits_NV[: len(nodes)], nodes, KERNELS)
        counts.append(calls.count)
    assert counts[1] - counts[0] <= 32 * MOST_CALLS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 63, 65, 4097])
def test_log_probabilities_of_many_rows_equal_single_rows_bit_for_bit(vocab: int, dtype: torch.dtype) -> None:
    """Alternate rows are rounded, so that many logits are equal, at the end of the list too."""
    logits_NV = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits_NV[::2] = logits_NV[::2].round()
    logits_NV[4] = 0.0
    logits_NV = logits_NV.to(dtype)
    wanted = [0, 1, 2, 20, 20, 5, 20, 20, 3]
    found = logprobs_of(logits_NV, [n % vocab for n in range(9)], wanted)
    for n, (own, count) in enumerate(zip(found, wanted, strict=True)):
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        logprobs = logits_NV[n].log_softmax(-1, dtype=exact).tolist()
        ranked = sorted(enumerate(logprobs), key=lambda entry: (-entry[1], entry[0]))
        assert own.chosen == logprobs[n % vocab]
        assert list(own.top) == ranked[:count]


@given(st.lists(TOKENS), st.lists(TOKENS), st.lists(TOKENS))
def test_a_history_counts_each_token_of_prompt_output_and_path_once(
    prompt: list[int], output: list[int], path: list[int]
) -> None:
    history = OutputCounts(prompt)
    for token in output:
        history.observe(token)
    for along in (path, []):  # a path leaves no trace in the history
        tokens, counts = history.along(along)
        whole = [*output, *along]
        assert len(tokens) == len(set(tokens)) and set(tokens) == {*prompt, *whole}
        assert list(counts) == [whole.count(token) for token in tokens]


def test_packed_tokens_behave_like_a_tuple() -> None:
    logits_NV = torch.randn(2, 50)
    first, second = (own.top for own in logprobs_of(logits_NV, [0, 1], [5, 20]))
    plain = tuple(first)
    assert isinstance(first, TopTokens) and first == plain and hash(first) == hash(plain)
    assert (len(first), first[0], first[1:3], repr(first)) == (5, plain[0], plain[1:3], repr(plain))
    assert first != second and len(second) == 20
