"""Runs faults one after another under a steady load, and reads off what each did."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO

from rich.console import Console
from rich.table import Table

from tests.chaos.faults import Fault
from tests.chaos.load import Load, Sent, goodput, verdicts
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
    """Inject one fault into a whole cluster under load; return when it is whole and idle again.

    is_timed: also wait until the goodput has recovered.
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


SPAN_S = 5.0  # goodput is counted over so much
SHARE = 0.9  # of the goodput before, at which the service has recovered
STEP_S = 0.25
EDGE = 0.5  # requests: what one more or less in a span does not decide

COLUMNS = (
    *("fault", "sent", "right", "retried", "429/503", "refused", "wrong", "lost", "slowest"),
    *("before", "recovery", "aim", "replaced", "hits", "evicted"),
)


@dataclass(slots=True)
class Outcome:
    """met_refusal: requests with a 429 or 503 at any try; refused: at the last one.

    recovery_s: until the first 5 s with 90 % of the goodput before the fault; 0: it never fell;
    None: it stayed low. replaced_s: until all workers ran; None: too late. hits: windows that were
    not encoded again. evicted: kept windows.
    """

    fault: str
    limit_s: float
    sent: int = 0
    right: int = 0
    retried: int = 0
    met_refusal: int = 0
    refused: int = 0
    wrong: int = 0
    lost: int = 0
    slowest_s: float = 0.0
    goodput_before: float = 0.0
    recovery_s: float | None = None
    replaced_s: float | None = None
    hits: int = 0
    evicted: int = 0
    left_over: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.lost or self.left_over) and self.replaced_s is not None

    def count(self, sent: Sequence[Sent]) -> None:
        by_verdict = verdicts(sent)
        self.sent = len(sent)
        self.right, self.refused = by_verdict["right"], by_verdict["refused"]
        self.wrong, self.lost = by_verdict["wrong"], by_verdict["lost"] + by_verdict["in flight"]
        self.retried = sum(one.retried for one in sent)
        self.met_refusal = sum(one.was_refused for one in sent)
        self.hits = sum(one.n_hits for one in sent)
        self.slowest_s = max((one.took_s for one in sent), default=0.0)
        self.details = [
            f"request {one.number} ({one.clip}), tries {one.statuses}: {one.verdict}, {one.detail}"
            for one in sent
            if one.verdict != "right"
        ]


def recovery_s(sent: Sequence[Sent], fault_s: float, until_s: float, before: float) -> float | None:
    enough = SHARE * before - EDGE / SPAN_S
    fell = False
    n_steps = int((until_s - SPAN_S - fault_s) / STEP_S) + 1
    for step in range(n_steps):
        begin_s = fault_s + step * STEP_S
        is_low = goodput(sent, begin_s, begin_s + SPAN_S) < enough
        if is_low:
            fell = True
        elif fell:
            return begin_s - fault_s
    return None if fell else 0.0


def table(outcomes: Sequence[Outcome]) -> str:
    made, notes = Table(*COLUMNS, box=None, pad_edge=False), []
    for one in outcomes:
        counts = (one.sent, one.right, one.retried, one.met_refusal)
        made.add_row(
            one.fault,
            *map(str, (*counts, one.refused, one.wrong, one.lost)),
            f"{one.slowest_s:.1f} s",
            f"{one.goodput_before:.1f}/s",
            _seconds(one.recovery_s),
            f"{one.limit_s:.0f} s",
            _seconds(one.replaced_s),
            *map(str, (one.hits, one.evicted)),
        )
        notes += [f"{one.fault}: left over: {what}" for what in one.left_over]
        notes += [f"{one.fault}: {detail}" for detail in one.details[:5]]
    console = Console(width=200, file=StringIO())
    console.print(made)
    return "\n".join((console.file.getvalue().rstrip(), *notes))  # type: ignore[attr-defined]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"
