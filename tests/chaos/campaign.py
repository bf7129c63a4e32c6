"""Runs faults one after another under a steady load, and reads off what each did."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from tests.chaos.faults import Fault
from tests.chaos.load import Load, goodput
from tests.chaos.report import SPAN_S, Outcome, recovery_s
from tests.chaos.target import Target

BEFORE_S = 10.0  # of undisturbed load before each fault
WATCH_S = 12.0  # a fault is watched at least so long
REPLACED_S = 120.0  # and at most so long after it was undone
SETTLE_S = 90.0  # for requests in flight to end, once all is whole


def run_fault(
    fault: Fault,
    target: Target,
    load: Load,
    *,
    before_s: float = BEFORE_S,
    watch_s: float = WATCH_S,
    is_timed: bool = True,
) -> Outcome:
    """Inject one fault into a whole cluster under load; returns when it is whole and idle again.

    is_timed: the recovery of the goodput is waited for; else only that of the workers.
    """
    outcome = Outcome(fault.name, fault.limit_s)
    n_before = len(load.sent)
    files_before, evicted_before = target.files(), target.evictions()
    load.go_on()
    began_s = time.monotonic()
    _sleep_until(began_s + before_s)
    # The first requests are still in flight when the first second is over.
    outcome.goodput_before = goodput(load.sent, began_s + min(2.0, before_s / 2), time.monotonic())
    fault_s = time.monotonic()
    fault.inject(target, load)
    try:
        _sleep_until(fault_s + fault.hold_s)
    finally:
        fault.undo(target)
    deadline_s = time.monotonic() + REPLACED_S
    while (now_s := time.monotonic()) < deadline_s:
        if outcome.replaced_s is None and not fault.lasts() and not target.missing():
            outcome.replaced_s = now_s - fault_s
        outcome.recovery_s = recovery_s(load.sent, fault_s, now_s, outcome.goodput_before)
        is_over = now_s - fault_s > max(watch_s, fault.hold_s + SPAN_S + 1)
        is_well = outcome.recovery_s is not None or not is_timed
        if outcome.replaced_s is not None and is_over and is_well:
            break
        time.sleep(0.5)
    load.pause()
    if outcome.replaced_s is None:
        outcome.left_over.append(f"not replaced: {target.missing()}")
    load.wait_for_answers(SETTLE_S)
    outcome.count(load.sent[n_before:])
    outcome.left_over += target.left_over(files_before)
    outcome.evicted = sum(
        max(0, n - evicted_before.get(name, 0)) for name, n in target.evictions().items()
    )
    return outcome


def run_faults(faults: Iterable[Fault], target: Target, load: Load) -> Iterator[Outcome]:
    for fault in faults:
        if reason := fault.possible(target):
            print(f"not run: {fault.name}: {reason}")
            continue
        yield run_fault(fault, target, load)


def _sleep_until(when_s: float) -> None:
    time.sleep(max(0.0, when_s - time.monotonic()))
