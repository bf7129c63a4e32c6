"""What Ray and Serve are told before they start: the environment of every node, and our names.

`splitscribe serve` sets it here; on the nodes of a cluster `splitscribe config env` prints it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

APP_NAME = "splitscribe"  # of the Serve application
MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # one upload crosses proxy -> router in such messages

ENVIRONMENT = {
    # One event loop per replica, gRPC between them: 4 to 5 times the requests/s of the default.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(MAX_MESSAGE_BYTES),
    "RAY_SERVE_PROXY_USE_GRPC": "1",  # the optimised mode forgets the way from proxy to router
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # HAProxy alone needs it, and turns it on itself
    # Counts with RAY_SERVE_ENABLE_HA_PROXY=1 alone: a router that stops keeps its WebSockets for so
    # long, in which open turns of realtime sessions end; by default each stop takes half a minute.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    # What is frozen is ended, not drained for a minute: who waits for it goes on elsewhere at once.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",  # a busy one is no dead one: many go through it
    # A machine that is silent for 15 to 20 s is gone, by default after a minute. Its workers are
    # replaced before, by their own checks; sooner, and a short break of the network would end Ray.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "6",
    # Also how long TCP waits for what it has sent, so that a call to a vanished machine ends: Serve
    # asks no more of a connection, and a router would wait there until its request's deadline.
    "RAY_grpc_client_keepalive_timeout_ms": "6000",
    # Serve's calls of replicas would go by a node's `http_proxy`, which refuses them: it is for the
    # world outside. Ray's own calls do not.
    "no_grpc_proxy": "0.0.0.0/0,::/0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # a killed worker's last lines are wanted
    # Ray gives workers a nice value of 15. Threads for bulk work, which run when cores are idle,
    # have a thirteenth of a core beside one of those, and a 340th beside one with a value of 0.
    "RAY_worker_niceness": "0",
    "OMP_WAIT_POLICY": "PASSIVE",  # both roles may use every core; only one works at a time
    # Torch's larger tensors lie in huge pages: a prompt takes half of the time without page faults,
    # and weights are read by fewer entries of the processor's page tables.
    "THP_MEM_ALLOC_ENABLE": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

# Of Ray that `serve` starts for itself. No worker process waits idle (46 MB each, by default one a
# core); those that Ray starts ahead are kept until the replicas take them. And what looks whether
# something has changed does so less often: here nobody adds machines, nothing is kept in Ray's
# object store, and a replica that fails is found by its own health checks, once a second. Workers
# import Serve while they wait for a task.
ONE_MACHINE_ENVIRONMENT = {
    "RAY_num_workers_soft_limit": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "20000",
    "RAY_kill_idle_workers_interval_ms": "2000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "2000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_io_context_monitor_probe_interval_ms": "5000",
    "RAY_task_events_report_interval_ms": "10000",
    "RAY_preload_python_modules": "cluster.serve.preload",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    # Ray's log monitor looks for new files at an interval where there are more than so many, and
    # ten times a second where there are less. Lines of files that it knows are shown as soon.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "1",
    "REPORTER_UPDATE_INTERVAL_MS": "15000",  # of a node's processor, memory and disks
}


def joining_environment() -> dict[str, str]:
    """What a process sets before it joins a Ray cluster that others have started.

    Ray sends the token in `~/.ray/auth_token` only where the mode says so.
    """
    has_token = Path("~/.ray/auth_token").expanduser().is_file()
    return {**ENVIRONMENT, "RAY_AUTH_MODE": "token"} if has_token else dict(ENVIRONMENT)


def deployment_suffixes(models: Iterable[str]) -> list[str]:
    """What is put behind the names of each model's deployments, if there are several.

    "a/b" and "a b" become "-a-b" and "-a-b-2".
    """
    found: list[str] = []
    for name in models:
        slug = suffix = "-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        number = 1
        while suffix in found:
            number += 1
            suffix = f"{slug}-{number}"
        found.append(suffix)
    return found or [""]
