"""What the Helm chart renders: as Ray, Kubernetes and KubeRay take it, and what it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli.config import shipped_config
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from cluster.serve.from_file import settings_of
from tests.support.helm import (
    MANIFESTS,
    chart_digest,
    complaints,
    documents,
    helm,
    manifest,
    missing_for_helm,
    rendered,
)

PROBES = {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
WRITABLE = {"/tmp", "/dev/shm", "/home/ray/.cache", "/models"}
MISSING = missing_for_helm()
calls_helm = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
# Several models on CPUs, with everything switched on.
ALL = """\
image: {tag: cpu}
imagePullSecrets: [{name: registry}]
models:
  small: {model: openai/whisper-small}
  base: {model: openai/whisper-base, aliases: [quick]}
settings: {log_format: json}
env: [{name: OMP_NUM_THREADS, value: "4"}]
modelCache: {existingClaim: models, pull: true}
encoder:
  settings: {device: cpu, gpus: 0}
  resources: {limits: {nvidia.com/gpu: null}}
  nodeSelector: {kubernetes.io/arch: amd64}
  tolerations: [{key: spot, operator: Exists}]
pod: {resources: {limits: {nvidia.com/gpu: null}}}
batches: {existingClaim: batches}
service: {type: LoadBalancer, annotations: {a: b}}
networkPolicy: {from: [{namespaceSelector: {}}]}
serviceMonitor: {enabled: true, labels: {release: prometheus}}
ingress: {enabled: true, tlsSecret: speech-tls, annotations: {a: b}}
gateway: {enabled: true, parentRefs: [{name: public, namespace: gateways}]}
"""


def manifest_of(name: str) -> list[dict[str, Any]]:
    return documents(shipped_config(name).path.read_text())


def shipped(name: str, kind: str) -> dict[str, Any]:
    (found,) = [one for one in manifest_of(name) if one["kind"] == kind]
    return found


def pods(name: str) -> dict[str, dict[str, Any]]:
    if name == "kubernetes":
        return {"all": shipped(name, "StatefulSet")["spec"]["template"]["spec"]}
    cluster = shipped(name, "RayService")["spec"]["rayClusterConfig"]
    groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    return {one["labels"]["pool"]: one["template"]["spec"] for one in groups}


def of_serve(service: dict[str, Any]) -> Settings:
    from ray.serve.schema import ServeDeploySchema

    content = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(content).applications
    return settings_of(application.args, environ={})


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_of_todays_chart(name: str) -> None:
    text = shipped_config(name).path.read_text()
    assert f"# chart: {chart_digest()}" in text, "make manifests renders it again"


@pytest.mark.parametrize(("name", "port"), [("kubernetes", 8000), ("kuberay", 8080)])
def test_prometheus_may_reach_the_metrics(name: str, port: int) -> None:
    ingress = shipped(name, "NetworkPolicy")["spec"]["ingress"]
    (rule,) = [one for one in ingress if "prometheus" in str(one)]
    assert rule["ports"] == [{"port": port}]


def test_pods_of_a_cluster_may_be_evicted() -> None:
    """Kubernetes evicts none for `maxUnavailable` where the owner has no scale, as a RayCluster."""
    found = [one for one in manifest_of("kuberay") if one["kind"] == "PodDisruptionBudget"]
    pools = {one["spec"]["selector"]["matchLabels"]["ray.io/group"]: one["spec"] for one in found}
    assert pools.keys() == {"headgroup", "router", "encoder", "decoder"}
    assert all(one["minAvailable"] == 0 for one in pools.values())
    assert not any("maxUnavailable" in one for one in pools.values())


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_s_variables_are_settings_that_there_are(name: str) -> None:
    for pod in pods(name).values():
        named = (
            one for one in pod["containers"][0]["env"] if one["name"].startswith("SPLITSCRIBE")
        )
        load_settings(environ={one["name"]: one["value"] for one in named})


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_has_no_privileges_and_may_write_where_it_must(name: str) -> None:
    for pod in pods(name).values():
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        mounts = container["volumeMounts"]
        assert {one["mountPath"] for one in mounts if not one.get("readOnly")} == WRITABLE
        assert {one["name"] for one in mounts} == {one["name"] for one in pod["volumes"]}


@pytest.mark.parametrize(
    ("manifest", "pool", "cores", "gib"),
    [
        ("kubernetes", "all", 8, 32),
        ("kuberay", "head", 4, 16),
        ("kuberay", "router", 8, 16),
        ("kuberay", "encoder", 8, 32),
        ("kuberay", "decoder", 8, 32),
    ],
)
def test_a_pod_fits_a_usual_node_of_which_kubernetes_keeps_some(
    manifest: str, pool: str, cores: int, gib: int
) -> None:
    """The autoscaler beside the head asks for half a core and 512 MiB."""
    limits = pods(manifest)[pool]["containers"][0]["resources"]["limits"]
    assert int(limits["cpu"]) <= cores - 1
    assert int(limits["memory"].removesuffix("Gi")) <= 0.8 * gib


def test_kuberay_takes_the_cluster_and_the_application() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr,
    )

    service = shipped("kuberay", "RayService")
    metadata = {"name": "splitscribe", "namespace": "default"}
    derived = _derive_autoscaling_config_from_ray_cr(
        {"metadata": metadata, "spec": service["spec"]["rayClusterConfig"]}
    )
    types = derived["available_node_types"]
    assert types["headgroup"]["resources"]["CPU"] == 0
    settings = of_serve(service)
    assert settings.handoff == "encoder_states"
    for role in (settings.router, settings.encoder, settings.decoder):
        assert role.node_labels == types[role.node_labels["pool"]]["labels"]
    for pool in ("encoder", "decoder"):
        assert types[pool]["resources"]["GPU"] == 1
    key_file = str(settings.router.api_key_file)
    mounts = pods("kuberay")["router"]["containers"][0]["volumeMounts"]
    assert any(key_file.startswith(one["mountPath"]) for one in mounts)


def test_no_probe_kills_a_pod_that_loads_a_model(tmp_path: Path) -> None:
    (container,) = pods("kubernetes")["all"]["containers"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in PROBES}
    assert paths == PROBES
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800
    file = tmp_path / "settings.yaml"
    file.write_text(shipped("kubernetes", "ConfigMap")["data"]["settings.yaml"])
    environ = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    settings = load_settings(file, environ=environ)
    assert settings.model == "openai/whisper-large-v3"
    mounts = [one["mountPath"] for one in container["volumeMounts"]]
    assert any(str(settings.router.api_key_file).startswith(path) for path in mounts)


def test_a_version_that_never_gets_ready_can_be_rolled_back() -> None:
    """Else Kubernetes waits for its pod before it replaces it (kubernetes/kubernetes#67250)."""
    one = shipped("kubernetes", "StatefulSet")["spec"]
    assert (one["replicas"], one["podManagementPolicy"]) == (1, "Parallel")


@pytest.mark.slow
@calls_helm
@pytest.mark.parametrize("name", MANIFESTS)
def test_helm_renders_the_manifests_that_are_shipped(name: str) -> None:
    assert shipped_config(name).path.read_text() == manifest(name)


@pytest.mark.slow
@calls_helm
@pytest.mark.parametrize("kuberay", ["true", "false"])
@pytest.mark.parametrize("values", ["", ALL, 'existingSecret: ""\nautoscaling: false'])
def test_kubernetes_and_kuberay_take_what_is_rendered(
    tmp_path: Path, values: str, kuberay: str
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(values)
    flags = ("--values", str(file), "--set", f"kuberay={kuberay}")
    helm("lint", "--strict", str(Path(shipped_config("helm/Chart").path).parent), *flags)
    for one in documents(rendered(*flags)):
        assert complaints(one) == [], one["kind"]
        if one["kind"] == "RayService":
            assert of_serve(one).placement == "split"
        if one["kind"] == "ConfigMap":
            settings = file.with_name("settings.yaml")
            settings.write_text(one["data"]["settings.yaml"])
            assert len(load_settings(settings, environ={}).by_model()) == 1 + (values == ALL)


@pytest.mark.slow
@calls_helm
@pytest.mark.parametrize(("autoscaling", "kept"), [("true", 1), ("false", 3)])
def test_a_budget_keeps_all_but_one_of_the_pods_that_a_pool_always_has(
    autoscaling: str, kept: int
) -> None:
    flags = ["kuberay=true", f"autoscaling={autoscaling}", "decoder.pods.min=2"]
    flags += ["decoder.pods.replicas=4", "podDisruptionBudget.single=0"]
    found = documents(rendered("--set", ",".join(flags)))
    budgets = {
        one["metadata"]["name"]: one["spec"]["minAvailable"]
        for one in found
        if one["kind"] == "PodDisruptionBudget"
    }
    assert budgets["splitscribe-decoder"] == kept
    assert budgets["splitscribe-encoder"] == 0
    assert budgets["splitscribe-headgroup"] == 1


@pytest.mark.slow
@calls_helm
def test_a_schema_refuses_what_is_misspelt() -> None:
    (service,) = [
        one for one in documents(rendered("--set", "kuberay=true")) if one["kind"] == "RayService"
    ]
    cluster = service["spec"]["rayClusterConfig"]
    cluster["headGroupSpec"]["label"] = {}
    cluster["workerGroupSpecs"][0]["template"]["spec"]["nodeSelectors"] = {}
    first, second = complaints(service)
    assert "label" in first
    assert "nodeSelectors" in second
