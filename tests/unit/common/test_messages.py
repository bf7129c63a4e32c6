"""What crosses processes: durations only, and no control message among the workers' calls."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from cluster.common import messages
from cluster.serve.replicas.workers import DecoderWorker, EncoderWorker

CLASSES = [
    value
    for value in vars(messages).values()
    if inspect.isclass(value) and dataclasses.is_dataclass(value)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_messages_are_frozen_and_carry_no_moment(cls: type) -> None:
    """Clocks of two hosts differ: a field says how long, never when."""
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    for field in dataclasses.fields(cls):
        assert not any(word in field.name for word in ("deadline", "timestamp_s", "_at", "time_"))


@pytest.mark.parametrize(
    ("worker", "calls"),
    [(EncoderWorker, {"encode", "status"}), (DecoderWorker, {"decode", "status"})],
)
def test_no_release_or_renewal_rides_through_serve(worker: type, calls: set[str]) -> None:
    """Those go by the transport's notifications; Serve's queues carry windows and status."""
    public = {name for name, _ in inspect.getmembers(worker, inspect.isfunction) if name[0] != "_"}
    local = {"check_health", "shut_down"}  # Serve's, and a worker's that has both roles
    hooks = {name for name in public if name.startswith("record_")}  # Serve's, to be told of load
    assert hooks <= {"record_autoscaling_stats"}
    assert public - local - hooks == calls
