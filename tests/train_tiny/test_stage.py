"""A stage's plan, and that a resumed run ends like an uninterrupted one."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from specdec.errors import ConfigError
from tools.train_tiny import stage
from tools.train_tiny.stage import Measured, Phase, Plan

PLAN = Plan(
    (Phase(6, 2, 8), Phase(4, 1, 16)), matrix_rate=0.02, embedding_rate=1e-2, other_rate=1e-2, warm_up=3
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(8, 32)
        self.matrix = nn.Linear(32, 40)

    def loss(self, at: int) -> Tensor:
        ids = torch.randint(8, (5,), generator=torch.Generator().manual_seed(at))
        loss: Tensor = self.matrix(self.embed(ids)).square().mean()
        return loss


def _run(model: Model, folder: Path, *, stop: int | None = None) -> None:
    def step(at: int, phase: Phase) -> Measured:
        if at == stop:
            raise KeyboardInterrupt
        assert phase == PLAN.phase(at)
        return Measured(model.loss(at), {})

    stage.run("model", PLAN, model, step, folder)


def test_a_plans_sizes_rates_and_tokens() -> None:
    assert PLAN.steps == 10 and PLAN.tokens(10) == 6 * 16 + 4 * 16 and PLAN.tokens(7) == 7 * 16
    assert PLAN.phase(5) == PLAN.phases[0] and PLAN.phase(6) == PLAN.phases[1]
    rates = [PLAN.scale(step) for step in range(10)]
    assert rates[0] == pytest.approx(1 / 3) and rates[3:7] == [1.0] * 4
    assert rates[7:] == pytest.approx([0.75, 0.5, 0.25])


def test_matrices_go_to_muon_and_the_rest_to_adam() -> None:
    muon, adam = stage.optimisers(Model(), PLAN)
    assert [x.ndim for group in muon.param_groups for x in group["params"]] == [2]
    assert sorted(x.numel() for group in adam.param_groups for x in group["params"]) == [40, 256]


def test_a_stopped_run_resumes_to_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "KEEP_EVERY", 0.0)
    whole, parts = Model(), Model()
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    _run(whole, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        _run(parts, tmp_path / "b", stop=4)
    resumed = Model()
    _run(resumed, tmp_path / "b")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name
    last = json.loads((tmp_path / "b" / "model.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 10 and last["tokens"] == PLAN.tokens(10)
    again = Model()
    _run(again, tmp_path / "b", stop=0)  # nothing is left to do
    assert torch.equal(again.matrix.weight, whole.matrix.weight)


def test_results_of_other_weights_are_neither_resumed_nor_deleted(tmp_path: Path) -> None:
    _run(Model(), tmp_path)
    other = Model()
    other.matrix.weight.data += 1.0
    before = (tmp_path / "model.pt").read_bytes()
    with pytest.raises(ConfigError, match="--work") as caught:
        _run(other, tmp_path, stop=0)
    assert caught.value.field == "work" and (tmp_path / "model.pt").read_bytes() == before


def test_results_of_another_plan_are_neither_resumed_nor_deleted(tmp_path: Path) -> None:
    _run(Model(), tmp_path)
    fresh, before = Model(), (tmp_path / "model.pt").read_bytes()
    other = Plan((Phase(1, 1, 1),), matrix_rate=0.0, embedding_rate=0.0, other_rate=0.0)
    with pytest.raises(ConfigError, match="another recipe or seed"):
        stage.run("model", other, fresh, lambda at, _: Measured(fresh.loss(at), {}), tmp_path)
    assert (tmp_path / "model.pt").read_bytes() == before
