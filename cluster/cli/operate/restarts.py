"""What an upgrade of the Helm chart restarts, told from the manifests of now and of next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROLES = ("router", "encoder", "decoder")
Manifest = Mapping[str, Any]


def restarts(now: list[Manifest], next_: list[Manifest]) -> list[str]:
    """A line for each workload: what ends, what serves meanwhile, and what changed.

    now, next_: the documents of `helm get manifest` and of `helm template`.
    """
    before, after = _workloads(now), _workloads(next_)
    lines = [f"{name}: is deleted, with its pods" for name in before.keys() - after.keys()]
    lines += [f"{name}: starts" for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        lines += [f"{name}: {line}" for line in _changes(before[name]["spec"], after[name]["spec"])]
    return sorted(lines) or ["nothing restarts"]


def _changes(now: Manifest, next_: Manifest) -> list[str]:
    if "rayClusterConfig" in now:
        return _ray_service(now, next_)
    if now["template"] == next_["template"]:
        return []
    where = ", ".join(differences(now["template"], next_["template"]))
    return [f"its pod restarts, and nothing serves meanwhile ({where})"]


def _ray_service(now: Manifest, next_: Manifest) -> list[str]:
    before, after = (_without_sizes(one["rayClusterConfig"]) for one in (now, next_))
    if before != after:
        groups = next_["rayClusterConfig"]["workerGroupSpecs"]
        pods = ", ".join(f"{one['replicas']} {one['groupName']}" for one in groups)
        return [
            f"a second cluster starts beside the first (1 head, {pods}), takes over when it is "
            f"ready, and all pods of the first end ({', '.join(differences(before, after))})"
        ]
    if now["serveConfigV2"] != next_["serveConfigV2"]:
        return [f"all workers ({', '.join(ROLES)}) restart one at a time, in the pods that run"]
    return []


def _without_sizes(cluster: Manifest) -> dict[str, Any]:
    """What KubeRay compares: numbers of pods and tolerations change in the cluster that runs."""
    muted = ("replicas", "minReplicas", "maxReplicas", "tolerations")

    def kept(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: kept(value) for key, value in node.items() if key not in muted}
        return [kept(one) for one in node] if isinstance(node, list) else node

    return dict(kept(cluster))


def differences(now: Any, next_: Any, path: str = "") -> list[str]:
    """Paths of what differs, such as spec.containers.0.image."""
    if now == next_:
        return []
    if isinstance(now, Mapping) and isinstance(next_, Mapping):
        pairs = [(key, now.get(key), next_.get(key)) for key in sorted({*now, *next_})]
    elif isinstance(now, list) and isinstance(next_, list) and len(now) == len(next_):
        pairs = [(str(i), *both) for i, both in enumerate(zip(now, next_, strict=True))]
    else:
        return [path]
    below = ((key, a, b) for key, a, b in pairs if a != b)
    return [one for key, a, b in below for one in differences(a, b, f"{path}.{key}".lstrip("."))]


def _workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {
        f"{one['kind']}/{one['metadata']['name']}": one
        for one in manifests
        if one["kind"] in ("RayService", "StatefulSet")
    }
