"""Synthetic results of the acceptance benchmark: small, seeded, with every optional part of real ones."""

import random
from typing import Any

CATEGORIES = ("code", "editing")
HOSTILE = "</script><script>document.title = 'broken'</script><b>& \"quoted\" \u2028"
SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {"draft": "none", "num_steps": 0, "topk": 1, "num_draft_tokens": 1}),
    ("mtp 4x1", {"draft": "mtp", "num_steps": 4, "topk": 1, "num_draft_tokens": 5}),
    ("mtp 4x4 of 16", {"draft": "mtp", "num_steps": 4, "topk": 4, "num_draft_tokens": 16}),
    ("suffix", {"draft": "suffix", "num_steps": 8, "topk": 1, "num_draft_tokens": 9}),
)


def result(*, seed: int = 0, prompts: int = 6) -> dict[str, Any]:
    """Return a synthetic result."""
    rng = random.Random(seed)
    records = [
        record
        for temperature in (0.0, 1.0)
        for name, shape in SHAPES
        for record in _records(rng, name, shape | {"temperature": temperature, "batch": 1}, prompts)
    ]
    return {
        "benchmark": "acceptance",
        "commit": "0123456789ab",
        "machine": "Linux, 2 cores",
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "model": "tiny",
        "arguments": {"max_tokens": 128, "seed": 0, "category": ["code", "editing"], "note": HOSTILE},
        "records": records,
        "examples": [
            {
                "setting": "mtp 4x4 of 16",
                "category": category,
                "prompt": f"def fib(n):\n    {HOSTILE}",
                "pieces": [["    return", 0], [" n", 1], [" if n", 2], [" < 2", 3], ["\n", 0], [HOSTILE, 1]]
                * 4,
            }
            for category in CATEGORIES
        ],
    }


def _records(rng: random.Random, name: str, setting: dict[str, Any], prompts: int) -> list[dict[str, Any]]:
    setting = {**setting, "chosen": False, "draft_noise": True}
    own = {
        category: [_prompt(rng, f"{category}/{i}", setting) for i in range(prompts)]
        for category in CATEGORIES
    }
    everything = {"all": [prompt for found in own.values() for prompt in found], **own}
    return [_record(name, setting, category, found) for category, found in everything.items()]


def _prompt(rng: random.Random, name: str, setting: dict[str, Any]) -> dict[str, Any]:
    depth = setting["num_steps"]
    chance = 0.72 - 0.15 * setting["temperature"] + rng.uniform(-0.1, 0.1)
    accepted = [0] * (depth + 1)
    tokens = steps = 0
    while tokens < 128:
        kept = next((d for d in range(depth) if rng.random() > chance), depth)
        accepted[kept] += 1
        steps, tokens = steps + 1, tokens + kept + 1
    return {
        "name": name,
        "tokens": tokens,
        "steps": steps,
        "looping": rng.random() < 0.2,
        "accepted": accepted,
        **by_depth(accepted),
    }


def by_depth(accepted: list[int]) -> dict[str, list[int]]:
    """Return per-depth counts for a histogram of drafts that all had the same depth."""
    depths = range(len(accepted) - 1)
    return {
        "reached": [sum(accepted[d:]) for d in depths],
        "followed": [sum(accepted[d + 1 :]) for d in depths],
    }


def _record(name: str, setting: dict[str, Any], category: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    depth = setting["num_steps"]
    histogram = [sum(p["accepted"][i] for p in found) for i in range(depth + 1)]
    steps, tokens = sum(histogram), sum(p["tokens"] for p in found)
    lengths = sorted(p["tokens"] / p["steps"] for p in found)
    calm = [p for p in found if not p["looping"]]
    speed = 190 * (tokens / steps) ** 0.7
    return {
        "setting": setting,
        "name": name,
        "category": category,
        "prompts": len(found),
        "tokens": tokens,
        "looping": len(found) - len(calm),
        "steps": steps,
        "acceptance_length": tokens / steps,
        "acceptance_length_not_looping": (
            sum(p["tokens"] for p in calm) / sum(p["steps"] for p in calm) if calm else None
        ),
        "spread": [lengths[0], lengths[-1]],
        "per_prompt": found,
        "per_depth": [sum(histogram[d + 1 :]) / max(sum(histogram[d:]), 1) for d in range(depth)],
        "histogram": histogram,
        "drafted_per_step": float(setting["num_draft_tokens"] - 1),
        "accepted_per_step": tokens / steps - 1,
        "ms_per_step": {"draft": 0.4 * depth, "verify": 4.21, "commit": 0.1, "rest": 0.33, "whole": 0.0},
        "tokens_per_second": {"median": speed, "p10": speed * 0.96, "p90": speed * 1.03},
        "speedup": {"median": speed / 190, "p10": speed / 190 * 0.97, "p90": speed / 190 * 1.04},
        "seconds": tokens / speed,
        "differing_texts": 0,
    }
