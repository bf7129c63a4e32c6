"""The environment variables for Ray and Serve on every node, and the names of deployments.

`splitscribe serve` sets them; `splitscribe config env` prints them for the nodes of a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

APP_NAME = "splitscribe"  # of the Serve application
MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # an upload passes from proxy to router as one message

ENVIRONMENT = {
    # One event loop per replica, gRPC between them: 4 to 5 times the requests/s of the default.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(MAX_MESSAGE_BYTES),
    "RAY_SERVE_PROXY_USE_GRPC": "1",  # the optimised mode does not set it for proxy to router
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # only HAProxy needs it, and turns it on itself
    # Only with RAY_SERVE_ENABLE_HA_PROXY=1: a stopping router keeps WebSockets open so long, for
    # open turns of realtime sessions to end. The default is half a minute.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    # Kill a frozen replica at once instead of draining it for a minute, so that calls are retried.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",  # a proxy with many requests answers late
    # A silent machine is declared dead after 15 to 20 s instead of a minute; its workers' own
    # health checks fail earlier. With less, a short network outage would end Ray.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "6",
    # Also TCP's timeout for unacknowledged data, so that calls to a vanished machine end before the
    # request's deadline.
    "RAY_grpc_client_keepalive_timeout_ms": "6000",
    # Serve's gRPC calls between replicas must not go through a node's `http_proxy`.
    "no_grpc_proxy": "0.0.0.0/0,::/0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # so that a killed worker's last lines are kept
    # Idle-priority threads for bulk work take a 340th of a core from other work with a nice value
    # of 0, and a thirteenth from work with 15, Ray's default for workers.
    "RAY_worker_niceness": "0",
    "OMP_WAIT_POLICY": "PASSIVE",  # both roles may use every core; only one works at a time
    # Huge pages for torch's large tensors: with fewer page faults a prompt takes half of the time,
    # and weights need fewer TLB entries.
    "THP_MEM_ALLOC_ENABLE": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

# For a Ray that `serve` starts on one machine. No idle worker processes are kept (46 MB each, by
# default one per core), but those started ahead live until the replicas take them. Polling is less
# frequent, as no machines join and nothing lies in Ray's object store. Workers import Serve while
# they wait for a task.
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
    # Ray's log monitor looks for new files at an interval only if there are more than so many, else
    # ten times a second. Lines of known files are shown without delay.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "1",
    "REPORTER_UPDATE_INTERVAL_MS": "15000",  # of a node's processor, memory and disks
}


def joining_environment() -> dict[str, str]:
    """What to set before joining a Ray cluster; Ray sends its auth token only in mode "token"."""
    has_token = Path("~/.ray/auth_token").expanduser().is_file()
    return {**ENVIRONMENT, "RAY_AUTH_MODE": "token"} if has_token else dict(ENVIRONMENT)


def deployment_suffixes(models: Iterable[str]) -> list[str]:
    """Return a suffix for the deployments of each model: "a/b", "a b" give "-a-b", "-a-b-2"."""
    found: list[str] = []
    for name in models:
        slug = suffix = "-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        number = 1
        while suffix in found:
            number += 1
            suffix = f"{slug}-{number}"
        found.append(suffix)
    return found or [""]
