"""The Kubernetes files: valid fields, and options, ports, probes and pauses that fit the server."""

import copy
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.config.options import settings_from
from specdec.ray.settings import RayApp
from specdec.server import run
from specdec.server.app import OPEN
from specdec.server.settings import ServerConfig
from tests.deploy.test_deploy import read
from tests.ray.live import needs_ray

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.37"
RAY_PROBES = {"/api/gcs_healthz", "/api/local_raylet_healthz", "/-/healthz"}
SECRET = {"api-key", "reach-secret"}
Manifest = dict[str, Any]


def manifests(name: str) -> list[Manifest]:
    return [*yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text("utf-8"))]


def templates(manifest: Manifest) -> Iterator[Manifest]:
    """Yield the pod templates of a Deployment or a RayService."""
    if manifest["kind"] == "Deployment":
        yield manifest["spec"]["template"]
    elif manifest["kind"] == "RayService":
        cluster = manifest["spec"]["rayClusterConfig"]
        yield from (group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]))


def serve_options(container: Manifest, settings: str, folder: Path) -> ServerConfig | None:
    """Parse a container's arguments as the server does; None if it runs something else."""
    words = [word.replace("$(POD_IP)", "10.0.0.1") for word in container.get("args", ())]
    if words[:1] != ["serve"]:
        return None
    path = folder / "specdec.yaml"
    path.write_text(settings.replace("/models/NAME", "tiny"))
    words = [
        str(path) if word.startswith("/etc/") else word.replace("/models/NAME", "tiny") for word in words
    ]
    return settings_from(read(words), ServerConfig)


def faults(own: list[Manifest], folder: Path) -> list[str]:
    """List what does not fit together."""
    settings = next((item["data"]["specdec.yaml"] for item in own if item["kind"] == "ConfigMap"), "")
    pods = [template for item in own for template in templates(item)]
    found = []
    for pod in pods:
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        for container in pod["spec"]["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            probes = [container[name]["httpGet"] for name in container if name.endswith("Probe")]
            found += [f"no path {p['path']}" for p in probes if p["path"] not in OPEN | RAY_PROBES]
            found += [
                f"no port {p['port']}"
                for p in probes
                if isinstance(p["port"], str) and p["port"] not in ports
            ]
            mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
            found += [f"no volume {name}" for name in mounts - volumes]
            for variable in container.get("env", ()):
                key = variable.get("valueFrom", {}).get("secretKeyRef", {}).get("key")
                found += [f"no secret {key}"] if key and key not in SECRET else []
            if server := serve_options(container, settings, folder):
                pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
                if (
                    pod["spec"]["terminationGracePeriodSeconds"]
                    < pause_s + server.drain_seconds + run.GRACE_S
                ):
                    found.append("the pod is killed while it drains")
                if server.port != ports["http"] or server.host != "0.0.0.0":
                    found.append("the server listens elsewhere")
                if "reach" in ports and server.reach_port != ports["reach"]:
                    found.append("the side channel listens elsewhere")
    for item in own:
        if item["kind"] == "Deployment":
            if item["spec"]["selector"]["matchLabels"] != item["spec"]["template"]["metadata"]["labels"]:
                found.append("the deployment selects other pods")
        elif item["kind"] == "Service":
            chosen = [p for p in pods if p.get("metadata", {}).get("labels") == item["spec"]["selector"]]
            ports = {
                p["name"]: p["containerPort"] for pod in chosen for p in pod["spec"]["containers"][0]["ports"]
            }
            for port in item["spec"]["ports"]:
                target = port.get("targetPort", port["port"])
                if target not in ports and target not in ports.values():
                    found.append(f"no pod has {target}")
    return found


@pytest.mark.parametrize("name", ["replicas", "prefill-decode", "rayservice"])
def test_parts_fit_together(name: str, tmp_path: Path) -> None:
    own = manifests(name)
    assert any([*templates(item)] for item in own)
    assert faults(own, tmp_path) == []


def first(own: list[Manifest]) -> Manifest:
    pod: Manifest = next(item for item in own if item["kind"] == "Deployment")["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda own: first(own).update(terminationGracePeriodSeconds=30), "killed while it drains"),
        (
            lambda own: first(own)["containers"][0]["readinessProbe"]["httpGet"].update(path="/live"),
            "no path",
        ),
        (lambda own: first(own)["containers"][0]["ports"][0].update(containerPort=80), "elsewhere"),
        (lambda own: first(own)["containers"][0]["ports"][0].update(name="web"), "no port http"),
        (lambda own: first(own)["volumes"].pop(), "no volume"),
        (lambda own: own[1]["spec"]["selector"].update(app="other"), "no pod has"),
    ],
)
def test_a_part_that_does_not_fit_is_found(
    change: Callable[[list[Manifest]], object], says: str, tmp_path: Path
) -> None:
    own = copy.deepcopy(manifests("prefill-decode"))
    change(own)
    try:
        found = faults(own, tmp_path)
    except KeyError:
        found = ["no port http"]
    assert any(says in fault for fault in found), found


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not installed"
)
@pytest.mark.parametrize("name", ["replicas", "prefill-decode", "rayservice"])
def test_fields_are_those_of_kubernetes(name: str) -> None:
    import kubernetes_validate  # type: ignore[import-not-found, unused-ignore]

    def check(manifest: Manifest) -> None:
        kubernetes_validate.validate(manifest, VERSION, strict=True)

    for item in manifests(name):
        if item["kind"] != "RayService":  # defined by KubeRay
            check(item)
        for template in templates(item):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": template["spec"]}
            check(pod)
            with pytest.raises(kubernetes_validate.ValidationError):
                check(pod | {"spec": template["spec"] | {"terminationGraceSeconds": 1}})


def test_the_router_gets_the_instances_addresses() -> None:
    own = manifests("prefill-decode")
    services = {item["metadata"]["name"] for item in own if item["kind"] == "Service"}
    pods = [template["spec"]["containers"][0] for item in own for template in templates(item)]
    router, decode = pods[-1], pods[1]
    urls = [word for word in router["args"] if word.startswith("http://")]
    assert {url.removeprefix("http://").partition(":")[0] for url in urls} == services - {"specdec"}
    assert "--reach-peers=specdec-prefill" in decode["args"] and "--reach-port=5600" in pods[0]["args"]
    if importlib.util.find_spec("sglang_router"):
        from sglang_router.launch_router import parse_router_args  # type: ignore[import-untyped, unused-ignore]

        args = parse_router_args(router["args"])
        assert args.prefill_urls == [(urls[0], 5600)] and args.decode_urls == [urls[1]]
        assert args.port == router["ports"][0]["containerPort"]


@needs_ray
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize("path", ["kubernetes/rayservice.yaml", "ray.yaml"])
def test_ray_serve_takes_the_file_and_we_its_options(path: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    text = yaml.safe_load((FOLDER.parent / path).read_text("utf-8"))
    schema = ServeDeploySchema.model_validate(
        yaml.safe_load(text["spec"]["serveConfigV2"]) if "spec" in text else text
    )
    application = schema.applications[0]
    assert application.import_path == "specdec.ray:app" and schema.http_options.port == 8000
    app = RayApp.of({**application.args, "model": "tiny"})
    assert not app.is_local
    if "spec" in text:
        workers = text["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
        limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == app.config.num_gpus and float(limits["cpu"]) >= app.config.num_cpus
        assert workers["maxReplicas"] == app.config.max_replicas
        grace_s = workers["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= app.server.drain_seconds + run.GRACE_S
