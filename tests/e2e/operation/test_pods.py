"""The pods of the chart as processes: a cluster by KubeRay's manifest, under load."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.demo.samples import sample_path, sample_text
from tests.e2e.conftest import wait_until
from tests.support.helm import documents, missing_for_helm, rendered
from tests.support.hosts import missing_for_hosts, networks
from tests.support.pods import TOKEN, Container, Pod, of_group, start

MISSING = missing_for_hosts() or missing_for_helm()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
HEAD = "splitscribe-head-svc.default.svc.cluster.local"
VALUES = """\
kuberay: true
autoscaling: false
model: demo
drainSeconds: 45
image: {tag: TAG}
settings: {log_level: INFO}
router: {settings: {audio_workers: 1}, shm: 512Mi}
head: {shm: 512Mi}
encoder:
  settings: {device: cpu, gpus: 0, threads: 1}
  resources: {limits: {nvidia.com/gpu: null}}
  shm: 1Gi
decoder:
  pods: {replicas: 2}
  settings: {device: cpu, gpus: 0, replicas: 2, threads: 1, max_batch: MAX_BATCH}
  resources: {limits: {nvidia.com/gpu: null}}
  shm: 1Gi
"""
START_S = 480.0
UP = "will now block forever"
# Requests one after another to the addresses of a file, as a Service has them; a line for each.
CLIENT = """\
import itertools, json, pathlib, sys, httpx
endpoints, audio, stop = map(pathlib.Path, sys.argv[1:])
headers = {"authorization": "Bearer s3cret-ann"}
for number in itertools.count():
    if stop.exists():
        break
    hosts = endpoints.read_text().split()
    url = f"http://{hosts[number % len(hosts)]}:8000/v1/audio/transcriptions"
    try:
        files = {"file": audio.read_bytes()}
        fields = {"model": "whisper-1"}
        said = httpx.post(url, headers=headers, data=fields, files=files, timeout=120)
        line = [said.status_code, said.json().get("text", said.text), url]
    except Exception as error:
        line = [0, repr(error), url]
    print(json.dumps(line) + "\\n", end="", flush=True)  # one write, as two clients share the file
"""


def service(folder: Path, max_batch: int = 8, tag: str = "cpu") -> dict[str, Any]:
    values = folder / "values.yaml"
    values.write_text(VALUES.replace("MAX_BATCH", str(max_batch)).replace("TAG", tag))
    found = documents(rendered("--values", str(values)))
    (one,) = [one for one in found if one["kind"] == "RayService"]
    return one


@dataclass(slots=True)
class Cluster:
    folder: Path
    service: dict[str, Any]
    client: str
    free: list[tuple[str, str]]
    pods: dict[str, Pod]

    def start(self, name: str, group: str = "") -> Pod:
        spec = self.service["spec"]["rayClusterConfig"]
        groups = {one["groupName"]: one for one in spec["workerGroupSpecs"]}
        container: Container = of_group(
            self.service, groups[group] if group else spec["headGroupSpec"], HEAD
        )
        network = self.free.pop(0)
        head = self.pods["head"].address if group else network[1]
        deadline_s = time.monotonic() + START_S
        while True:  # kubelet starts what has ended again
            pod = start(self.folder / name, name, network, container, {HEAD: head})
            self.pods[name] = pod
            while pod.process.poll() is None:
                if UP in pod.log:
                    return pod
                time.sleep(0.5)
            assert time.monotonic() < deadline_s, pod.log[-3000:]
            time.sleep(1.0)

    def in_network(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.client, *command]

    def call(self, path: str, *flags: str, port: int = 8000, pod: str = "head") -> Any:
        url = f"http://{self.pods[pod].address}:{port}{path}"
        run = subprocess.run(
            self.in_network("curl", "-sS", "--max-time", "20", *flags, url),
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(run.stdout) if run.stdout.strip() else None

    def deploy(self, content: dict[str, Any]) -> None:
        config = json.dumps(yaml.safe_load(content["spec"]["serveConfigV2"]))
        self.call(
            "/api/serve/applications/",
            *("-X", "PUT", "-H", f"Authorization: Bearer {TOKEN}"),
            *("-H", "Content-Type: application/json", "-d", config),
            port=8265,
        )

    def workers(self, role: str) -> set[str]:
        pool = self.call("/health")["pools"][role]["workers"]
        return {one["replica"] for one in pool if one["healthy"]}

    def decoder(self) -> str:
        """A decoder's pod in which workers run: Serve may put both into one."""
        for _ in range(60):
            for name, pod in self.pods.items():
                if name.startswith("decoder") and is_ready(pod):
                    return name
            time.sleep(1.0)
        raise AssertionError("no pod of decoders is ready")

    def endpoints(self, *names: str, of: Cluster | None = None) -> None:
        """What the Service has: pods that are ready; one that is to end is taken out first."""
        pods = [(of or self).pods[name] for name in names]
        for pod in pods:
            wait_until(lambda pod=pod: is_ready(pod), 60, f"{pod.name} to be ready", 1.0)
        new = self.folder / "new"
        new.write_text(" ".join(pod.address for pod in pods))
        new.replace(self.folder / "endpoints")

    def start_all(self, *names: str) -> None:
        for name in names:
            self.start(name, "" if name == "head" else name.partition("-")[0])
        try:
            wait_until(lambda: self.deploy(self.service) or True, START_S, "the dashboard", 1.0)
            wait_until(
                lambda: len(self.workers("decoder")) == 2 and len(self.workers("encoder")) == 1,
                START_S,
                "every worker",
                1.0,
            )
        except AssertionError:
            print(*(f"{one.name}:\n{one.log[-3000:]}" for one in self.pods.values()), sep="\n")
            raise

    @contextmanager
    def load(self) -> Iterator[Path]:
        stop = self.folder / "stop"
        stop.unlink(missing_ok=True)
        audio = str(sample_path("short"))
        command = [sys.executable, "-c", CLIENT, str(self.folder / "endpoints"), audio, str(stop)]
        said = self.folder / "said"
        with said.open("w") as file:
            clients = [subprocess.Popen(self.in_network(*command), stdout=file) for _ in range(2)]
        try:
            yield said
        finally:
            stop.touch()
            for one in clients:
                one.wait(130)
        answers = [json.loads(line) for line in said.read_text().splitlines()]
        assert answers
        wrong = [one for one in answers if one[:2] != [200, sample_text("short")]]
        assert not wrong, f"{len(wrong)} of {len(answers)}: {wrong[:3]}"


def is_ready(pod: Pod) -> bool:
    """By the probe that KubeRay gives to workers; the operator asks the head's proxy itself."""
    paths = ["8000/-/healthz"]
    if pod.name != "head":
        paths.insert(0, "52365/api/local_raylet_healthz")
    asked = [f"wget --tries 1 -T 9 -q -O- http://localhost:{one} | grep success" for one in paths]
    return pod.run("bash", "-c", " && ".join(asked)).returncode == 0


@pytest.fixture(scope="module")
def cluster(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("pods")
    folder.chmod(0o755)
    with ExitStack() as stack:
        _, (client, *others) = stack.enter_context(networks(12))
        made = Cluster(folder, service(folder), client[0], others, {})
        stack.callback(lambda: [one.kill() for one in made.pods.values()])
        made.start_all("head", "router", "encoder", "decoder-0", "decoder-1")
        made.endpoints("head", "router")
        yield made


def test_it_serves_from_read_only_roots_and_kubelet_finds_it_ready(cluster: Cluster) -> None:
    with cluster.load() as said:
        wait_until(lambda: said.read_text().count("\n") > 3, 60, "some requests")
    for pod in cluster.pods.values():
        assert pod.run("touch", "/home/ray/file").returncode, "the root can be written to"
        assert pod.run("id", "-u").stdout == "1000\n"
        assert "SPLITSCRIBE_PORT" not in pod.run("env").stdout
    for name in ("head", "router", "encoder", cluster.decoder()):
        wait_until(lambda name=name: is_ready(cluster.pods[name]), 60, f"{name} to be ready", 1.0)


def test_a_killed_worker_costs_no_request(cluster: Cluster) -> None:
    with cluster.load() as said:
        wait_until(lambda: said.read_text().count("\n") > 3, 60, "some requests")
        cluster.pods.pop(cluster.decoder()).kill()
        cluster.start("decoder-2", "decoder")
        wait_until(lambda: len(cluster.workers("decoder")) == 2, START_S, "another worker", 1.0)


def test_a_drained_worker_costs_no_request(cluster: Cluster) -> None:
    name = cluster.decoder()
    cluster.endpoints("head", "router", name)
    with cluster.load() as said:
        wait_until(lambda: said.read_text().count("\n") > 3, 60, "some requests")
        cluster.endpoints("head", "router")
        cluster.pods.pop(name).delete()
    cluster.start("decoder-3", "decoder")
    wait_until(lambda: len(cluster.workers("decoder")) == 2, START_S, "both decoders", 1.0)


def test_new_settings_roll_under_load(cluster: Cluster) -> None:
    new = service(cluster.folder, max_batch=4)
    before = {role: cluster.workers(role) for role in ("encoder", "decoder")}
    with cluster.load():
        cluster.deploy(new)

        def rolled() -> bool:
            return all(
                len(now := cluster.workers(role)) == len(old) and not now & old
                for role, old in before.items()
            )

        wait_until(rolled, START_S, "every worker to be new", 1.0)
        time.sleep(2.0)


def test_a_new_image_takes_over_under_load(cluster: Cluster) -> None:
    """As KubeRay's operator does it: a second cluster, then the Service, and the first one ends."""
    new = service(cluster.folder, max_batch=4, tag="0.2.0")
    second = replace(cluster, folder=cluster.folder / "second", service=new, pods={})
    old = list(cluster.pods.values())
    try:
        with cluster.load() as said:
            second.start_all("head", "router", "encoder", "decoder-0")
            cluster.endpoints("head", "router", of=second)
            time.sleep(new["spec"]["rayClusterDeletionDelaySeconds"])
            for pod in old:
                pod.kill()
            before = said.read_text().count("\n")
            wait_until(lambda: said.read_text().count("\n") > before + 3, 60, "answers of the new")
    finally:
        for pod in second.pods.values():
            pod.kill()
