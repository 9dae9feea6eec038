"""A record's figures, from synthetic measurements."""

from typing import Any

import pytest

from specdec.bench.acceptance.measure import MeasuredAnswer, Measurement, pieces
from specdec.bench.acceptance.settings import Drafting, Setting, SettingGroup
from specdec.bench.acceptance.summary import PairedBatch, records
from specdec.core.stats import PHASES
from specdec.draft.proposal import DraftShape

ROUND = (*range(4), *[7] * 6)


def answer(name: str, said: tuple[int, ...], **fields: Any) -> MeasuredAnswer:
    made: dict[str, Any] = {
        "category": "code",
        "name": name,
        "token_ids": said,
        "origins": (0,) * len(said),
        "steps": len(said) - 1,
        "tokens": len(said) - 1,
        "drafted": 0,
        "reached": (),
        "followed": (),
        "histogram": (len(said) - 1,),
    }
    return MeasuredAnswer(**{**made, **fields})


def measurement(*answers: MeasuredAnswer, seconds: float, timed: int) -> Measurement:
    phases = {**dict.fromkeys(PHASES, 0.0), "verify": 0.5 * seconds, "draft": 0.25 * seconds}
    return Measurement(answers, seconds, 0.25 * seconds, phases, timed)


def test_a_record_by_hand() -> None:
    straight, circles = tuple(range(13)), ROUND
    chain = {"steps": 4, "tokens": 12, "drafted": 12, "reached": (4, 3, 3), "followed": (3, 3, 2)}
    drafted = answer("a", straight, **chain, histogram=(1, 0, 1, 2))
    looping = answer(
        "b", circles, steps=3, tokens=9, drafted=6, reached=(3, 3), followed=(3, 3), histogram=(0, 0, 3)
    )
    pairs = [
        PairedBatch(
            "code",
            measurement(drafted, seconds=2.0, timed=4),
            measurement(answer("a", straight), seconds=6.0, timed=12),
        ),
        PairedBatch(
            "edit",
            measurement(looping, seconds=1.0, timed=3),
            measurement(answer("b", circles[:-1]), seconds=4.5, timed=9),
        ),
    ]
    setting = Setting(Drafting("mtp", DraftShape(3, 1, 4)), SettingGroup(0.0, 1))
    whole, code, edit = records({setting: pairs})
    assert [r["category"] for r in (whole, code, edit)] == ["all", "code", "edit"]
    assert (whole["prompts"], whole["tokens"], whole["steps"], whole["output_tokens"]) == (2, 21, 7, 23)
    assert (whole["looping"], whole["differing_texts"]) == (1, 1)
    assert (whole["acceptance_length"], whole["acceptance_length_not_looping"]) == (3.0, 3.0)
    assert edit["acceptance_length_not_looping"] is None
    assert whole["per_depth"] == pytest.approx([6 / 7, 1.0, 2 / 3])
    assert whole["histogram"] == [1, 0, 4, 2]
    assert (whole["drafted_per_step"], whole["accepted_per_step"]) == pytest.approx((18 / 7, 14 / 7))
    assert whole["ms_per_step"]["verify"] == pytest.approx(1e3 * 1.5 / 7)
    assert code["tokens_per_second"] == {"median": 6.5, "p10": 6.5, "p90": 6.5}
    assert code["speedup"]["median"] == pytest.approx(3.0) and edit["speedup"]["median"] == pytest.approx(5.0)
    assert whole["speedup"]["median"] == pytest.approx(4.0)
    assert (whole["seconds"], whole["reading_seconds"]) == (3.0, 0.75)


def test_an_answer_of_one_token_has_no_length() -> None:
    one = measurement(answer("a", (5,), histogram=(0,)), seconds=1.0, timed=0)
    whole, _ = records({Setting(Drafting("none"), SettingGroup(0.0, 1)): [PairedBatch("code", one, one)]})
    assert (whole["acceptance_length"], whole["spread"], whole["steps"]) == (None, None, 0)


def test_without_a_tokenizer_pieces_are_ids() -> None:
    assert pieces(None, answer("a", (5, 7), origins=(0, 1))) == [("5 ", 0), ("7 ", 1)]
