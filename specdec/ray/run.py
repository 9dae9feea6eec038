"""Start or join Ray, deploy, and shut down gracefully."""

import contextlib
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from specdec.errors import ConfigError
from specdec.ray.settings import RayApp
from specdec.server.listen import bind, say
from specdec.server.supervisor import READY, STOPPING, tell_supervisor

logger = logging.getLogger(__name__)

STORE_BYTES = 80 << 20
"""Ray's object store: no request passes through it. Ray's minimum is 75 MiB."""
ENVIRONMENT = {
    # HAProxy instead of Serve's Python proxy: 0.7 ms instead of 100 to 200 ms of lag per event of 8 streams.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # a process per core that no deployment uses
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}
"""Set before Ray is imported, unless set already. A cluster has what its nodes were started with."""
NAME = "specdec"
"""The application's name in Ray Serve."""


def check_ray() -> None:
    """Raise if Ray Serve is not installed."""
    try:
        found = importlib.util.find_spec("ray.serve")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError("ray is not installed; pip install 'specdec[ray]'", field="ray_address")


def run(app: RayApp, *, is_verbose: bool = False) -> None:
    """Serve until SIGTERM or SIGINT; then drain and stop what was started."""
    host = app.server.host
    _check_cores(app)
    with bind(host, app.server.port) as sock:
        port = int(sock.getsockname()[1])  # HAProxy binds it anew
    own = {} if app.config.ray_address else {**ENVIRONMENT, **_free_ports()}
    for name, value in own.items():
        os.environ.setdefault(name, value)
    stop = threading.Event()

    def tell(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with _ray(app, is_verbose=is_verbose):
        _check_gpus(app)
        with _serve(app, host, port):
            shown = f"[{host}]" if ":" in host else host
            say(f"serving {app.model} on Ray at http://{shown}:{port}/v1; Ctrl-C stops it")
            tell_supervisor(READY)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, tell)
            stop.wait()
            tell_supervisor(STOPPING)
            say("stopping: waiting for requests in flight; a second signal ends at once")
    say("stopped")


@contextlib.contextmanager
def _ray(app: RayApp, *, is_verbose: bool) -> Iterator[None]:
    """Join a cluster, or start Ray on this machine and stop it on exit."""
    import ray

    address = app.config.ray_address
    level = logging.INFO if is_verbose else logging.ERROR
    own: dict[str, Any] = {} if address else {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    if not address and app.is_local:
        own["_node_ip_address"] = "127.0.0.1"
    try:
        ray.init(address or "local", logging_level=level, log_to_driver=is_verbose, namespace=NAME, **own)
    except Exception as error:  # Ray raises this very class, if it does not start in time
        ray.shutdown()
        says = f"ray_address: Ray does not start ({_last_line(str(error))})"
        raise ConfigError(says, field="ray_address") from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own handler leaves its processes
    try:
        yield
    finally:
        ray.shutdown()


def _free_ports() -> dict[str, str]:
    """Choose ports for HAProxy's statistics: with fixed ones only one Ray could run on a machine."""
    with bind("127.0.0.1", 0) as one, bind("127.0.0.1", 0) as other:
        names = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
        return {name: str(own.getsockname()[1]) for name, own in zip(names, (one, other), strict=True)}


def _check_cores(app: RayApp) -> None:
    """Raise if this machine has too few cores. Ray would wait for more; a cluster may get them."""
    if not app.config.ray_address:
        _check_enough(app, "num_cpus", app.config.num_cpus, os.cpu_count() or 1)


def _check_gpus(app: RayApp) -> None:
    """Raise if Ray sees too few GPUs on this machine."""
    import ray

    if not app.config.ray_address:
        _check_enough(app, "num_gpus", app.config.num_gpus, ray.cluster_resources().get("GPU", 0))


def _check_enough(app: RayApp, field: str, each: float, have: float) -> None:
    count, kind = app.config.count, field[4:-1].upper()
    if count * each > have:
        need = f"1 replica of {each:g} needs" if count == 1 else f"{count} replicas of {each:g} need"
        raise ConfigError(
            f"{field}: {need} {count * each:g} {kind}s, and this machine has {have:g}; "
            f"lower {'prefill, decode' if app.config.prefill else 'num_replicas'} or {field}.",
            field=field,
        )


@contextlib.contextmanager
def _serve(app: RayApp, host: str, port: int) -> Iterator[None]:
    """Deploy the application; remove it on exit, after requests in flight."""
    from ray import serve

    from specdec.ray.deployments import build

    level = "INFO" if logger.isEnabledFor(logging.DEBUG) else "ERROR"
    logging.getLogger("ray.serve").setLevel(level)
    try:
        try:
            serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": level})
        except RuntimeError as error:
            says = f"port: Ray Serve does not start ({_last_line(str(error))})"
            raise ConfigError(says, field="port") from error
        try:
            serve.run(build(app), name=NAME, route_prefix="/")
        except RuntimeError as error:
            raise ConfigError(f"{app.model} failed to start on Ray: {_why()}", field="model") from error
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # nothing was deployed
            serve.delete(NAME)  # waits for requests in flight, which a shutdown would cut off
        if not app.config.ray_address:
            serve.shutdown()


def _why() -> str:
    """Return why the deployments failed: the last line of the first one's trace."""
    from ray import serve

    status = serve.status().applications[NAME]
    told = [own.message for own in status.deployments.values() if own.status == "UNHEALTHY"]
    return _last_line(told[0] if told else status.message)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
