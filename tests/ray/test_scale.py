"""The autoscaling policy, and what deployments ask Ray for."""

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.ray.scale import scale, wanted_share
from specdec.ray.settings import RayApp
from tests.ray.live import needs_ray


def decide(shares: list[float] | None, current: int) -> int:
    metrics = None if shares is None else {"wanted_share": {f"r{i}": own for i, own in enumerate(shares)}}
    context: Any = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=current)
    count, state = scale(context)
    assert not state
    return count


@pytest.mark.parametrize(
    ("figures", "share"),
    [((0.5, 4, 0), 0.5), ((0.9, 3, 6), 3.0), ((0.1, 2, 9), 5.5), ((0.0, 0, 0), 0.0), ((0.0, 0, 5), 5.0)],
)
def test_waiting_requests_are_taken_for_as_large_as_running_ones(
    figures: tuple[float, float, float], share: float
) -> None:
    assert wanted_share(*figures) == pytest.approx(share)


def test_more_replicas_come_together_and_fewer_one_by_one() -> None:
    assert decide([0.9, 0.9], 2) == 3
    assert decide([0.9, 3.0], 2) == 5
    assert decide([0.7, 0.7], 2) == 2
    assert decide([0.0] * 4, 4) == 3
    assert decide([0.0], 1) == decide(None, 1) == 1


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
    assert scaled.autoscaling_config.downscale_delay_s == 7
    pair = deployments(prefill=1, decode=2, **{"num-gpus": 1})
    assert {name: own.num_replicas for name, own in pair.items()} == {"Ingress": 1, "Prefill": 1, "Decode": 2}
    assert pair["Ingress"].ray_actor_options["num_cpus"] == 0
