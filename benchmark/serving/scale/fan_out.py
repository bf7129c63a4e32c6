"""One update of the workers' loads to one router, as Serve tells it: bytes, and both ends' time.

The messages and both ends are Serve's own classes. The controller builds the list of all workers
and pickles it for each router; a router unpickles it and updates what it knows. Serve does so for
as long as any load changes, once in each round of its control loop (0.1 s by default).
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

from ray import cloudpickle
from ray.serve._private.common import DeploymentTargetInfo, RunningReplicaInfo

from benchmark.serving.scale.choice import Worker, make_router
from benchmark.serving.scale.figures import SIZES, Figure, cpu_us
from cluster.messages import WorkerLoad

WORKERS_PER_ROUTER = 16
UPDATES_PER_S = 10.0


def make_update(size: int, work: float) -> DeploymentTargetInfo:
    """What Serve sends to each router."""
    workers = [Worker(number) for number in range(size)]
    infos = [
        RunningReplicaInfo(
            replica_id=worker.replica_id,
            node_id=f"{number:056x}",  # as long as Ray's
            node_ip="10.0.0.1",
            availability_zone=None,
            actor_name=f"SERVE_REPLICA::scale#encoder#{worker.replica_id.unique_id}",
            max_ongoing_requests=64,
            routing_stats=WorkerLoad(work, 16.0, 0.1).as_stats(),
            replica_metadata=worker.replica_metadata,
            port=10_000,
        )
        for number, worker in enumerate(workers)
    ]
    return DeploymentTargetInfo(is_available=True, running_replicas=infos)


def measure() -> list[Figure]:
    figures = []
    for size in SIZES:
        update = make_update(size, 1.0)
        message = cloudpickle.dumps(update)
        build = cpu_us(partial(make_update, size, 1.0)) / 1000
        send = cpu_us(partial(cloudpickle.dumps, update)) / 1000
        receive = cpu_us(_receiver(size, message)) / 1000
        routers = max(1, size // WORKERS_PER_ROUTER)
        told_bytes = len(message) * routers * UPDATES_PER_S / size
        busy = UPDATES_PER_S * (build + send * routers) / 1000
        for what, unit, ours in (
            ("told: one update to one router", "KiB", len(message) / 1024),
            ("told: the controller builds an update", "ms", build),
            ("told: the controller sends it to one router", "ms", send),
            ("told: a router takes it", "ms", receive),
            ("told: traffic of a worker's reports", "KiB/s", told_bytes / 1024),
            ("told: cores of the controller", "cores", busy),
        ):
            figures.append(Figure(what, size, unit, None, ours))
    return sorted(figures, key=lambda figure: figure.what)


def _receiver(size: int, message: bytes) -> Any:
    workers = [Worker(number) for number in range(size)]
    by_id = {worker.replica_id: worker for worker in workers}
    router = make_router(workers, asks=False)

    def receive() -> None:
        update = pickle.loads(message)
        for info in update.running_replicas:
            by_id[info.replica_id].routing_stats = info.routing_stats
        replicas: Any = workers
        router._note_replicas(replicas)

    return receive
