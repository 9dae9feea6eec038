"""The application on Ray Serve: an Ingress before Engine deployments, one, or one for each role."""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from specdec.ray.engine import KILL_S, Engine
from specdec.ray.ingress import Ingress
from specdec.ray.settings import DECODE, PREFILL, RayApp, RayConfig

MOST_ONGOING = 1 << 16
"""Requests per replica for Ray: replicas admit or refuse them themselves, with 429 and 503."""
HEALTH_TIMEOUT_S = 30.0
"""Maximum seconds of a health check, some for a loaded machine: the process's end is seen at once."""
START_ATTEMPTS = 3
"""Starts of a new deployment's replicas, in all, until it has failed."""


def build(app: RayApp) -> serve.Application:
    """Bind the deployments."""
    config = app.config
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=config.num_ingress,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MOST_ONGOING,
        graceful_shutdown_timeout_s=app.server.drain_seconds + 2 * KILL_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    if config.prefill:
        prefill = _engine(app, "Prefill", num_replicas=config.prefill).bind(app, PREFILL)
        decode = _engine(app, "Decode", num_replicas=config.decode).bind(app, DECODE)
        return ingress.bind(app, decode, prefill)
    return ingress.bind(app, _engine(app, "Engine", **_scale(config)).bind(app))


def _engine(app: RayApp, name: str, **scale: Any) -> serve.Deployment:
    config = app.config
    # The class stays as its module defines it: Ray pickles a rebound name by value, with its globals.
    return serve.deployment(
        Engine,
        name=name,
        ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
        max_ongoing_requests=MOST_ONGOING,
        health_check_period_s=config.stats_period,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=app.server.drain_seconds + 2 * KILL_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=START_ATTEMPTS,
        request_router_config=RequestRouterConfig(
            request_router_class="specdec.ray.router:ExpectedTimeRouter",
            request_routing_stats_period_s=config.stats_period,
        ),
        **scale,
    )


def _scale(config: RayConfig) -> dict[str, Any]:
    if config.max_replicas is None:
        return {"num_replicas": config.num_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.num_replicas,
            max_replicas=config.max_replicas,
            policy=AutoscalingPolicy(policy_function="specdec.ray.scale:scale"),
            upscale_delay_s=0,
            downscale_delay_s=config.scale_down_delay,
        )
    }
