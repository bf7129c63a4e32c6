"""Pods of the rendered manifests as processes, as kubelet and KubeRay 1.7 would start them.

The root is this machine's, read only, with the folders and the user of our image. seccomp, cgroups,
NetworkPolicy, the image itself and the autoscaler's container are left out.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.common.kernels.cpu.cache import ensure_jit_cache
from cluster.serve.distribution import package_root
from tests.support.hosts import UNSHARE

USER = 1000
TOKEN = "0" * 64  # the operator's secret
KUBELET = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
LINKS = {  # of a Service called splitscribe, to pods that do not refuse them
    "SPLITSCRIBE_SERVICE_HOST": "10.96.3.7",
    "SPLITSCRIBE_PORT": "tcp://10.96.3.7:8000",
}
LIMIT = "ulimit -n ${RAY_START_ULIMIT_OPEN_FILES:-65536}"
UNITS = {"Mi": 2**20, "Gi": 2**30}
START = """\
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir -p /mnt/root /mnt/layer/etc /mnt/layer/root /mnt/layer/home/ray {points}
cp -r {cache}/. /mnt/layer/home/ray/.cache
chmod 755 /mnt/layer/root
chown {user}:{user} /mnt/layer/home/ray
echo ray:x:{user}:{user}::/home/ray:/bin/bash | cat /etc/passwd - > /mnt/layer/etc/passwd
printf '127.0.0.1 localhost\\n{hosts}' > /mnt/layer/etc/hosts
mount -t overlay overlay -o ro,lowerdir=/mnt/layer:/ /mnt/root
mount -t proc proc /mnt/root/proc
mount --rbind /sys /mnt/root/sys
mount --rbind /dev /mnt/root/dev
hostname {name}
cd /mnt/root
"""
AS_USER = (  # with no privilege: what a container's process is
    f"setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs "
    "--bounding-set=-all --inh-caps=-all"
)


@dataclass(frozen=True, slots=True)
class Container:
    """What runs in a pod, after what its init containers ran: commands, each with its mounts."""

    command: list[str]
    environ: dict[str, str]
    volumes: list[dict[str, Any]]
    mounts: list[dict[str, Any]]
    init: list[tuple[list[str], list[dict[str, Any]]]]
    pre_stop: list[str] = field(default_factory=list)
    grace_s: float = 30.0


@dataclass(slots=True)
class Pod:
    name: str
    space: str
    address: str
    container: Container
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def first_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])

    def run(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        entered = ["nsenter", "--target", str(self.first_pid()), "--all", "--root", "--wd"]
        return subprocess.run(
            [*entered, *AS_USER.split(), *command],
            env=self.container.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.first_pid(), signal.SIGKILL)
            self.process.wait(20)

    def delete(self) -> None:
        """What an eviction does: the hook, SIGTERM, and after the grace period SIGKILL."""
        ends_s = time.monotonic() + self.container.grace_s
        if self.container.pre_stop:
            hook = self.run(*self.container.pre_stop, timeout_s=self.container.grace_s)
            assert hook.returncode == 0, hook.stdout + hook.stderr
        os.kill(self.first_pid(), signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(1.0, ends_s - time.monotonic()))
        self.kill()


def start(
    folder: Path,
    name: str,
    network: tuple[str, str],
    container: Container,
    hosts: dict[str, str],
) -> Pod:
    """network: namespace and address; hosts: what the cluster's DNS knows, by name."""
    space, address = network
    folder.mkdir(parents=True, exist_ok=True)
    cache = image_cache(folder.parent / "image-cache")
    lines = []
    for command, mounts in container.init:
        lines += _mounted(folder, container.volumes, mounts)
        lines.append(f"chroot /mnt/root {AS_USER} {shlex.join(command)}")
        lines += [f"umount -R /mnt/root{one['mountPath']}" for one in mounts]
    lines += _mounted(folder, container.volumes, container.mounts)
    lines.append(f"exec chroot /mnt/root {AS_USER} {shlex.join(container.command)}")
    every = [container.mounts, *(mounts for _, mounts in container.init)]
    points = {f"/mnt/layer{one['mountPath']}" for mounts in every for one in mounts}
    known = "".join(f"{ip} {host}\\n" for host, ip in {**hosts, name: address}.items())
    script = START.format(points=" ".join(points), hosts=known, name=name, user=USER, cache=cache)
    script += "\n".join(lines)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*f"ip netns exec {space} {UNSHARE} bash -c".split(), script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=container.environ | {"HOSTNAME": name},
            start_new_session=True,
        )
    return Pod(name, space, address, container, folder, process)


def _mounted(
    folder: Path, volumes: list[dict[str, Any]], mounts: list[dict[str, Any]]
) -> list[str]:
    """Commands that mount; what is no memory lies below `folder`."""
    by_name = {one["name"]: one for one in volumes}
    lines = []
    for mount in sorted(mounts, key=lambda one: str(one["mountPath"])):
        volume, there = by_name[mount["name"]], f"/mnt/root{mount['mountPath']}"
        empty = volume.get("emptyDir")
        if empty and empty.get("medium") == "Memory":
            size = quantity(empty["sizeLimit"])
            lines.append(f"mount -t tmpfs -o size={size},mode=1777 tmpfs {there}")
            continue
        own = folder / "volumes" / volume["name"]
        own.mkdir(parents=True, exist_ok=True)
        own.chmod(0o777)
        for source in volume.get("projected", {}).get("sources", []):
            for item in source.get("secret", {}).get("items", []):
                (own / item["path"]).write_text("ann s3cret-ann\n")
        lines.append(f"mount --bind {own} {there}")
    return lines


def image_cache(folder: Path) -> Path:
    if not folder.exists():
        kernels = ensure_jit_cache()
        shutil.copytree(kernels, folder / "numba" / kernels.name)
    return folder


def quantity(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else int(text)


def of_group(service: dict[str, Any], group: dict[str, Any], head: str) -> Container:
    """What KubeRay's operator starts for a group of a RayService. head: the name of its Service."""
    is_head = "groupName" not in group
    spec = group["template"]["spec"]
    (container,) = spec["containers"]
    limits = container["resources"]["limits"]
    parameters = {
        "num-cpus": str(limits["cpu"]),
        "memory": str(quantity(limits["memory"])),
        **group["rayStartParams"],
        "labels": ",".join(f"{key}={value}" for key, value in sorted(group["labels"].items())),
        "metrics-export-port": "8080",
        "dashboard-agent-listen-port": "52365",
        **({"dashboard-host": "0.0.0.0"} if is_head else {"address": f"{head}:6379"}),
    }
    flags = sorted(["--block", *(f"--{key}={value}" for key, value in parameters.items())])
    ray_start = " ".join(["ray start", *(["--head"] if is_head else []), *flags])
    environ = _environ(spec, container) | {
        "RAY_CLUSTER_NAME": service["metadata"]["name"],
        "RAY_CLUSTER_NAMESPACE": "default",
        "RAY_NODE_TYPE_NAME": group.get("groupName", "headgroup"),
        "KUBERAY_GEN_RAY_START_CMD": ray_start,
        "RAY_PORT": "6379",
        "RAY_TIMEOUT_MS_TASK_WAIT_FOR_DEATH_INFO": "0",
        "RAY_GCS_SERVER_REQUEST_TIMEOUT_SECONDS": "5",
        "RAY_SERVE_KV_TIMEOUT_S": "5",
        "RAY_ADDRESS": "127.0.0.1:6379" if is_head else f"{head}:6379",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
    }
    wait = f"until ray health-check --address {head}:6379 > /dev/null 2>&1; do sleep 1; done"
    init = [(one["command"], one["volumeMounts"]) for one in spec["initContainers"]]
    if not is_head:
        init.append((["/bin/bash", "-c", "--", wait], container["volumeMounts"]))
    return Container(
        ["/bin/bash", "-c", "--", f"{LIMIT}; {ray_start}"],
        environ,
        spec["volumes"],
        container["volumeMounts"],
        init,
        container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", []),
        spec.get("terminationGracePeriodSeconds", 30),
    )


def _instructions(dockerfile: Path) -> list[tuple[str, str]]:
    text = "\n".join(
        line for line in dockerfile.read_text().splitlines() if not line.startswith("#")
    )
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (one.partition(" ") for one in lines) if word]


def _environ(spec: dict[str, Any], container: dict[str, Any]) -> dict[str, str]:
    path = f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    environ = {"PATH": path, "HOME": "/home/ray"}
    for word, rest in _instructions(package_root() / "configs/docker/cpu.Dockerfile"):
        if word == "ENV":
            environ |= dict(one.split("=", 1) for one in shlex.split(rest))
    environ |= KUBELET | (LINKS if spec.get("enableServiceLinks", True) else {})
    return environ | {one["name"]: one["value"] for one in container["env"] if "value" in one}
