"""Replicas of `specdec serve` on Ray Serve: placement, the choice of a replica, and the ingress."""

from collections.abc import Mapping
from typing import Any


def app(args: Mapping[str, Any]) -> Any:
    """Build the application for `serve run specdec.ray:app model=MODEL` and `serve deploy FILE`.

    The arguments are options of `specdec ray`, without their leading dashes.
    """
    from specdec.ray.deployments import build
    from specdec.ray.settings import RayApp

    return build(RayApp.of(args))
