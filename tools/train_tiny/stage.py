"""A resumable training stage: fixed steps from a fixed seed, saved so that a stop loses two minutes."""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import ConfigError

KEEP_EVERY = 120.0
"""Seconds between resume checkpoints."""
SMOOTH = 0.95
SMALLEST_SIDE = 32
"""Matrices with fewer rows or columns have too few directions to orthogonalise."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A number of steps with windows of one size."""

    steps: int
    batch: int
    length: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A stage's settings; two runs of one plan take the same steps."""

    phases: tuple[Phase, ...]
    matrix_rate: float
    """Muon's learning rate, for matrices; 0: Adam optimises them too."""
    embedding_rate: float
    other_rate: float
    warm_up: int = 30
    decay: float = 0.4
    """The final share of steps, over which the rates decay to zero."""
    seed: int = 0

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase(self, step: int) -> Phase:
        """Return the phase of a step."""
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        raise IndexError(step)

    def tokens(self, step: int) -> int:
        """Return the tokens of all steps before this one."""
        total = 0
        for phase in self.phases:
            total += min(step, phase.steps) * phase.batch * phase.length
            step -= min(step, phase.steps)
        return total

    def scale(self, step: int) -> float:
        """Return the share of the full learning rates at a step."""
        left = (self.steps - step) / max(self.decay * self.steps, 1)
        return min(1.0, (step + 1) / self.warm_up, left)


@dataclass(frozen=True, slots=True)
class Measured:
    """A step's loss, and figures to log."""

    loss: Tensor
    figures: Mapping[str, Tensor]


def optimisers(model: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Assign matrices to Muon, and token tables and vectors to AdamW, with the plan's rates."""
    groups: dict[str, list[nn.Parameter]] = {"matrix": [], "embedding": [], "other": []}
    for name, weight in model.named_parameters():
        is_matrix = weight.ndim == 2 and min(weight.shape) >= SMALLEST_SIDE
        is_table = "embed" in name or "lm_head" in name
        kind = "embedding" if is_table else "matrix" if is_matrix and plan.matrix_rate else "other"
        groups[kind].append(weight)
    made: list[torch.optim.Optimizer] = []
    if groups["matrix"]:
        made.append(torch.optim.Muon(groups["matrix"], lr=plan.matrix_rate, weight_decay=0.01))
    rates = {"embedding": plan.embedding_rate, "other": plan.other_rate}
    adam = [{"params": groups[kind], "lr": rate} for kind, rate in rates.items() if groups[kind]]
    made.append(torch.optim.AdamW(adam, betas=(0.9, 0.98), weight_decay=0.0))
    for optimiser in made:
        for group in optimiser.param_groups:
            group["full_rate"] = group["lr"]
    return made


Step = Callable[[int, Phase], Measured]


def run(name: str, plan: Plan, model: nn.Module, step: Step, folder: Path, *, fed: str = "") -> None:
    """Train for the plan's steps, resuming from `folder`; leaves the trained weights in `model`.

    A saved state is valid only for the same plan, initial weights and `fed` (a digest of the training data).
    """
    tools = optimisers(model, plan)
    kept, whose = folder / f"{name}.pt", f"{plan!r} {digest(model)} {fed}".rstrip()
    done, spent = _resume(kept, whose, model, tools)
    if done == plan.steps:
        return
    log = Log(name, plan, folder / f"{name}.jsonl", done, spent)
    saved = time.monotonic()
    for at in range(done, plan.steps):
        for optimiser in tools:
            for group in optimiser.param_groups:
                group["lr"] = group["full_rate"] * plan.scale(at)
        measured = step(at, plan.phase(at))
        measured.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in tools:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        log.note(at, {"loss": measured.loss.detach(), **measured.figures})
        if time.monotonic() - saved > KEEP_EVERY or at + 1 == plan.steps:
            _keep(kept, whose, model, tools, at + 1, log.spent)
            saved = time.monotonic()
    log.close()


class Log:
    """Log a JSON line and a progress line, every ten seconds."""

    def __init__(self, name: str, plan: Plan, path: Path, done: int, spent: float) -> None:
        self.name, self.plan, self.path, self.before = name, plan, path, spent
        self.first, self.began, self.shown = done, time.monotonic(), 0.0
        self.smooth: dict[str, float] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= done))

    @property
    def spent(self) -> float:
        """Seconds of training, including those before a stop."""
        return self.before + time.monotonic() - self.began

    def note(self, step: int, figures: Mapping[str, Tensor]) -> None:
        """Record a step's figures."""
        for key, figure in figures.items():
            value = float(figure)
            self.smooth[key] = SMOOTH * self.smooth.get(key, value) + (1 - SMOOTH) * value
        now, last = time.monotonic(), step + 1 == self.plan.steps
        if now - self.shown < 10 and not last:
            return
        self.shown = now
        tokens, passed = self.plan.tokens(step + 1), now - self.began
        speed = (tokens - self.plan.tokens(self.first)) / max(passed, 1e-9)
        left = (self.plan.tokens(self.plan.steps) - tokens) / max(speed, 1e-9)
        rounded = {key: round(value, 4) for key, value in self.smooth.items()}
        line = {"step": step + 1, "tokens": tokens, "seconds": round(self.spent, 1), **rounded}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = "  ".join(f"{key} {value:.3f}" for key, value in self.smooth.items())
        start, end = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
        text = (
            f"{self.name} {step + 1}/{self.plan.steps}  {shown}  {speed:,.0f} tokens/s  {_clock(left)} left"
        )
        print(start + text, end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the progress line."""
        if sys.stderr.isatty():
            print(file=sys.stderr)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def digest(model: nn.Module) -> str:
    """Return a digest of a model's weights."""
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _keep(
    path: Path,
    whose: str,
    model: nn.Module,
    tools: Sequence[torch.optim.Optimizer],
    done: int,
    spent: float,
) -> None:
    """Save everything needed to resume, replacing the previous file atomically."""
    whole = {
        "whose": whose,
        "done": done,
        "spent": spent,
        "model": model.state_dict(),
        "tools": [optimiser.state_dict() for optimiser in tools],
    }
    fresh = path.with_suffix(".new")
    torch.save(whole, fresh)
    fresh.replace(path)


def _resume(
    path: Path, whose: str, model: nn.Module, tools: Iterable[torch.optim.Optimizer]
) -> tuple[int, float]:
    """Load the saved state of the same run; return the steps done and their seconds."""
    if not path.exists():
        return 0, 0.0
    kept: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if kept["whose"] != whose:
        raise ConfigError(
            f"work: {path} is of another recipe or seed, or of other weights before it; name another folder "
            "with --work, or remove that file to train its stage anew",
            field="work",
        )
    model.load_state_dict(kept["model"])
    for optimiser, state in zip(tools, kept["tools"], strict=True):
        optimiser.load_state_dict(state)
    return int(kept["done"]), float(kept["spent"])
