"""The comparison with llama.cpp, against a stand-in for its server."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.models.compare_llama_cpp import WINDOW, ScoredTokens, Text, compare, force, windows

VOCAB = 10


class ModularServer:
    """Prefer the successor of the last token, and write the token with a bias, if there is one."""

    def __init__(self, begin: list[int], *, obeys: bool = True) -> None:
        self.begin, self.obeys = begin, obeys

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        if path == "/tokenize":
            ids = [ord(letter) % VOCAB for letter in body["content"]]
            return {"tokens": [*self.begin, *ids] if body["add_special"] else ids}
        best = (body["prompt"][-1] + 1) % VOCAB
        chosen = body["logit_bias"][0][0] if self.obeys else best
        logprob = -0.5 if chosen == best else -2.0
        return {
            "completion_probabilities": [
                {"id": chosen, "logprob": logprob, "top_logprobs": [{"id": best, "logprob": -0.5}]}
            ]
        }


def test_given_tokens_are_scored() -> None:
    texts = [Text([1, 2, 3, 7, 8], 2), Text([4, 0], 1)]
    found = force(ModularServer([]), texts)
    assert found == ScoredTokens([-0.5, -2.0, -0.5, -2.0], [3, 4, 8, 5])


def test_a_server_that_writes_another_token_is_refused() -> None:
    with pytest.raises(AssertionError, match="did not write"):
        force(ModularServer([], obeys=False), [Text([1, 5], 1)])


@pytest.mark.parametrize("begin", [[], [3]])
@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (256, 1), (257, 2), (10_000, 3)])
def test_a_text_is_cut_to_whole_windows(begin: list[int], tokens: int, count: int) -> None:
    text = "".join(chr(i) for i in range(3 * WINDOW + 1))
    found = windows(ModularServer(begin), text, tokens)
    assert [(len(own.token_ids), own.first) for own in found] == [(WINDOW, WINDOW // 2)] * count
    assert all(own.token_ids[: len(begin)] == begin for own in found)
    ids = [i for own in found for i in own.token_ids[len(begin) :]]
    assert ids == [i % VOCAB for i in range(len(ids))]


def test_disagreements_are_attributed() -> None:
    """Of four tokens three differ: the exact model agrees with each side once, and once with neither."""
    peer = ScoredTokens([-1.0, -1.0, -1.0, -1.0], [1, 2, 3, 4])
    own = ScoredTokens([-1.0, -2.0, -1.0, -1.0], [1, 5, 6, 7])
    exact = ScoredTokens([-1.0, -1.0, -1.0, -1.5], [1, 5, 3, 9])
    report = "\n".join(compare(peer, own, exact))
    assert "specdec, llama.cpp:  same choice 25.00%; log-probabilities: mean difference -0.2500" in report
    assert "llama.cpp, exact:    same choice 50.00%; log-probabilities: mean difference +0.1250" in report
    assert "perplexity: llama.cpp 2.7183, specdec 3.4903 (+28.40%), exact 3.0802 (+13.31%)" in report
    assert "at the 3 tokens where specdec and llama.cpp differ" in report
    assert "with specdec at 1, with llama.cpp at 1, with neither at 1" in report
