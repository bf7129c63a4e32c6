"""The balancers and their metrics, in Serve's controller beside its autoscaling hooks.

This is a module of its own, since hooks are sent by value and what they import is not.
"""

from __future__ import annotations

from functools import cache

from cluster.common.metrics import CONTROLLER_METRICS, Recorder, ray_recorder
from cluster.serve.replica_count import Balancer, Decision


@cache
def of(application: str, model: str) -> Balancer:
    """The one balancer of a model's pools."""
    return Balancer()


@cache
def _recorder() -> Recorder:
    return ray_recorder(CONTROLLER_METRICS)


def record(pool: str, model: str, before: int, decision: Decision) -> None:
    """Report a decision to the metrics, and count it if it changes something."""
    recorder = _recorder()
    recorder.set("splitscribe_autoscaling_target_workers", decision.workers, pool=pool, model=model)
    if decision.workers != before:
        recorder.add(
            "splitscribe_autoscaling_decisions_total",
            pool=pool,
            model=model,
            direction="up" if decision.workers > before else "down",
            reason=decision.reason,
        )
