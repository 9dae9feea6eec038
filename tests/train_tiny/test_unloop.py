"""Detection of the tokens of a text that repeat in a loop."""

import torch

from tools.train_tiny import unloop
from tools.train_tiny.unloop import LEAST, PROMPT, circling


def _answer(tokens: list[int]) -> torch.Tensor:
    """Prepend a prompt without repetition to an answer."""
    return torch.tensor([[*range(1000, 1000 + PROMPT), *tokens]])


def test_a_circle_counts_from_its_third_round() -> None:
    period = 20
    circle = list(range(period))
    going = circling(_answer([*range(500, 510), *circle, *circle, *circle]))[0, PROMPT:]
    # Ten tokens, one round, and the second round up to its last token, which completes the repetition.
    assert going.nonzero()[:, 0].tolist() == list(range(10 + 2 * period - 1, 10 + 3 * period))


def test_short_circles_need_more_rounds() -> None:
    going = circling(_answer([7] * 40))[0, PROMPT:]
    assert going.nonzero()[:, 0].tolist() == list(range(LEAST, 40))


def test_text_that_repeats_short_runs_does_not_circle() -> None:
    tokens = [token for i in range(10) for token in (1, 2, 3, 4, 5, 6, 100 + i)]
    assert not circling(_answer(tokens)).any()


def test_prompts_do_not_count(monkeypatch: object) -> None:
    ids = torch.zeros(1, PROMPT + 4, dtype=torch.int64)
    assert circling(ids)[0].nonzero()[:, 0].tolist() == list(range(PROMPT, PROMPT + 4))
    assert unloop.LONGEST >= 21
