"""The autoscaling policy: up at once, down slowly, within the limits."""

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.ray.scale import Scale, wanted_share
from specdec.ray.settings import RayApp
from tests.ray.live import needs_ray

CALM_S = 45.0


def decide(
    shares: list[float], current: int, state: dict[str, float], now_s: float, least: int = 1, most: int = 8
) -> tuple[int, dict[str, float]]:
    context: Any = SimpleNamespace(
        aggregated_metrics={"wanted_share": {f"r{i}": own for i, own in enumerate(shares)}},
        current_time=now_s,
        target_num_replicas=current,
        policy_state=state,
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
    )
    return Scale(CALM_S)(context)


@pytest.mark.parametrize(
    ("figures", "share"),
    [((0.5, 4, 0), 0.5), ((0.9, 3, 6), 3.0), ((0.1, 2, 9), 5.5), ((0.0, 0, 0), 0.0), ((0.0, 0, 5), 5.0)],
)
def test_waiting_requests_are_taken_for_as_large_as_running_ones(
    figures: tuple[float, float, float], share: float
) -> None:
    assert wanted_share(*figures) == pytest.approx(share)


def test_more_replicas_come_at_once_and_within_the_limit() -> None:
    assert decide([0.9, 0.9], 2, {}, 0.0) == (3, {})
    assert decide([0.9, 30.0], 2, {}, 0.0) == (8, {})
    assert decide([0.7, 0.7], 2, {"calm_since_s": 0.0}, 999.0) == (2, {}), "load ends a calm time"


def test_fewer_replicas_come_one_by_one_after_a_calm_time() -> None:
    count, state = decide([0.0] * 4, 4, {}, 100.0)
    assert count == 4
    count, state = decide([0.0] * 4, 4, state, 100.0 + CALM_S - 1)
    assert count == 4
    count, state = decide([0.0] * 4, 4, state, 100.0 + CALM_S)
    assert count == 3
    assert decide([0.0] * 3, 3, state, 101.0 + CALM_S)[0] == 3
    assert decide([0.0] * 2, 2, {"calm_since_s": 0.0}, 999.0, least=2)[0] == 2


def test_without_reports_the_number_stays() -> None:
    context: Any = SimpleNamespace(
        aggregated_metrics=None,
        current_time=0.0,
        target_num_replicas=1,
        policy_state=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=2,
    )
    assert Scale(CALM_S)(context) == (1, {})


@needs_ray
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_deployments_ask_ray_for_what_a_replica_needs() -> None:
    from specdec.ray.deployments import build

    def deployments(**given: object) -> dict[str, Any]:
        app = build(RayApp.of({"model": "tiny", "num-cpus": 2, **given}))
        found, todo = {}, [app._bound_deployment]
        for own in todo:
            found[own.name] = own
            todo += [arg._bound_deployment for arg in own.init_args if hasattr(arg, "_bound_deployment")]
        return found

    engine = deployments(**{"num-gpus": 2, "num-replicas": 3})["Engine"]
    assert engine.num_replicas == 3 and engine.ray_actor_options["num_gpus"] == 2
    assert engine.ray_actor_options["num_cpus"] == 2
    # One actor has all GPUs of a replica, so they are on one node without a placement group.
    assert engine._replica_config.placement_group_bundles is None
    scaled = deployments(**{"max-replicas": 4, "scale-down-delay": 7})["Engine"]._deployment_config
    assert scaled.autoscaling_config.min_replicas == 1 and scaled.autoscaling_config.max_replicas == 4
    policy = scaled.autoscaling_config.policy.get_policy()(**scaled.autoscaling_config.policy.policy_kwargs)
    assert isinstance(policy, Scale)
    pair = deployments(prefill=1, decode=2, **{"num-gpus": 1})
    assert {name: own.num_replicas for name, own in pair.items()} == {"Ingress": 1, "Prefill": 1, "Decode": 2}
    assert pair["Ingress"].ray_actor_options["num_cpus"] == 0
