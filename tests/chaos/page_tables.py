"""Whether every worker's tables of pages agree: asked inside the processes of an idle cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tests.chaos.target import Target

ANSWER_S = 60.0
FLAG = "--gcs-address="


def broken_tables(target: Target) -> list[str]:
    """What `check_integrity` of some worker says; empty where all is well, or none can be asked."""
    if not target.ray_token:
        return []
    joins = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": target.ray_token}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.chaos.page_tables", _address(target)],
        env={**os.environ, **joins},
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, tuple[int, list[str]]] = json.loads(ran.stdout.splitlines()[-1])
    for role in ("encoder", "decoder"):
        looked = sum(n for name, (n, _) in found.items() if f"#{role}#" in name)
        assert looked >= target.wanted[role], found
    return [f"{name}: {what}" for name, (_, broken) in found.items() for what in broken]


def _address(target: Target) -> str:
    arguments: Iterator[str] = iter(target.processes("raylet")[0].cmdline())
    return next(one.removeprefix(FLAG) for one in arguments if one.startswith(FLAG))


def look(replica: Any) -> tuple[int, list[str]]:
    import time

    worker = replica._replica_impl._user_callable_wrapper.user_callable  # Serve has no other way
    there = [worker._kv, worker._engine]
    there = [one for one in there if hasattr(one, "check_integrity")]
    broken: list[str] = []
    for one in there:
        for is_last in (False, False, True):
            try:
                one.check_integrity()
                break
            except RuntimeError as error:
                if is_last:
                    broken.append(str(error))
            time.sleep(0.2)  # a release may be on its way
    return len(there), broken


def main(address: str) -> None:
    import ray

    from cluster.serve.start.ray_session import ray_session

    found = {}
    with ray_session(address, False):
        for actor in ray.util.list_named_actors(all_namespaces=True):
            name = actor["name"]
            if "#encoder#" in name or "#decoder#" in name:
                replica = ray.get_actor(name, namespace=actor["namespace"])
                found[name] = ray.get(replica.__ray_call__.remote(look), timeout=ANSWER_S)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
