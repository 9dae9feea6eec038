"""The table for people: the order of its rows."""

from typing import Any

from specdec.bench.acceptance.table import render

STEP = {"draft": 1.0, "forward": 2.0}


def record(draft: str, name: str, *, length: float, speedup: float, chosen: bool = False) -> dict[str, Any]:
    around = {"median": speedup, "p10": speedup, "p90": speedup}
    return {
        "setting": {"draft": draft, "temperature": 0.0, "batch": 1, "draft_noise": True, "chosen": chosen},
        "name": name,
        "category": "all",
        "prompts": 1,
        "looping": 0,
        "differing_texts": 0,
        "acceptance_length": length,
        "acceptance_length_not_looping": length,
        "spread": [length, length],
        "ms_per_step": STEP,
        "tokens_per_second": around,
        "speedup": around,
        "drafted_per_step": 0.0,
    }


def test_the_default_is_first_and_the_others_follow_by_speed() -> None:
    records = [
        record("none", "none", length=1.0, speedup=1.0),
        record("mtp", "mtp 4x4:16", length=5.16, speedup=0.77),
        record("mtp", "mtp 4x1", length=3.0, speedup=1.22),
        record("auto", "auto chosen", length=2.5, speedup=1.1, chosen=True),
    ]
    report = {
        **{"model": "m", "family": "f", "dtype": "float32", "device": "cpu", "cpu": "c", "threads": 1},
        **{"versions": {}, "commit": "c", "left_out": [], "interrupted": False, "rounding": None},
        "records": records,
    }
    rows = [" ".join(line.split()[1:-8]) for line in render(report).splitlines() if line.startswith("all ")]
    assert rows == ["auto chosen", "mtp 4x1", "none", "mtp 4x4:16"]
