"""Admission by deadline, all or nothing; every page and slot comes back."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any

from cluster.common.errors import DeadlineExceededError
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.pool import PagePool
from cluster.common.kv.wire import FetchStats
from cluster.common.messages import CrossKVHandle, DecodeOptions, DecodeRequest, Priority
from cluster.common.priorities import PASSED_BY, URGENCY
from decoder_worker.scheduling.scheduler import ALONE, STEPS, TOKENS_AT_ONCE, Scheduler
from decoder_worker.scheduling.sequence import DecodeSequence, SequenceState

FETCHED = FetchStats(1, 0.0, "none")


def make_scheduler(windows: int = 2, max_batch: int = 3, **options: Any) -> Scheduler:
    """Cross pages for `windows`, three a window; self pages two a sequence."""
    cross = PagePool(PageLayout("m", 1, 1, 4, 6, 2, "float32"), 3 * windows)
    own = PagePool(PageLayout("m", 1, 1, 4, 4, 2, "float32"), 2 * max_batch)
    return Scheduler(cross, own, 2, max_batch, **options)


def make_sequence(
    deadline: float = 1.0,
    n_prompt: int = 0,
    n_pages: int = 3,
    priority: Priority = "interactive",
) -> DecodeSequence:
    handle = CrossKVHandle("r", 0, 0, "agent", b"", "", (0,) * n_pages, 0, 6, 0, 0, "lease", 1.0)
    options = DecodeOptions(prompt_tokens=(0,) * n_prompt)
    request = DecodeRequest("r", 0, 0, handle, options, 1.0, priority=priority)
    return DecodeSequence(
        request, Future(), arrived_s=0.0, deadline_s=deadline, n_new_max=4, language="en"
    )


def add(scheduler: Scheduler, *sequences: DecodeSequence) -> None:
    for one in sequences:
        scheduler.add(one)


def fetch(*sequences: DecodeSequence) -> None:
    for one in sequences:
        one.fetched = FETCHED


def test_a_trimmed_window_takes_as_many_pages_as_its_handle_has() -> None:
    scheduler = make_scheduler(windows=2, max_batch=4)
    for n_pages in (1, 2, 3, 1):
        scheduler.add(make_sequence(n_pages=n_pages))
    admitted = scheduler.admit()
    assert [len(sequence.cross_pages) for sequence in admitted] == [1, 2, 3]
    assert scheduler.n_waiting == 1  # six pages are out
    for sequence in admitted:
        scheduler.release(sequence)
    (last,) = scheduler.admit()
    scheduler.release(last)
    scheduler.check_integrity()


def test_kv_is_read_ahead_of_free_rows_up_to_a_bound() -> None:
    """A batch of 4: four begin, the KV of two more is read, others wait though pages are free."""
    scheduler = make_scheduler(windows=9, max_batch=4)
    sequences = [make_sequence(deadline) for deadline in reversed(range(8))]
    add(scheduler, *sequences)
    admitted = scheduler.admit()
    assert [sequence.deadline_s for sequence in admitted] == [0, 1, 2, 3, 4, 5]
    assert all(sequence.cross_pages and not sequence.rows for sequence in admitted)
    assert all(s.state is SequenceState.WAITING and not s.cross_pages for s in sequences[:2])
    assert (scheduler.n_free_slots, scheduler.n_without_slots, scheduler.n_waiting) == (0, 2, 2)
    fetch(*admitted)
    running = scheduler.start_running()
    assert [sequence.deadline_s for sequence in running] == [0, 1, 2, 3]
    assert sorted(row.slot for sequence in running for row in sequence.rows) == [0, 1, 2, 3]
    assert scheduler.start_running() == []
    scheduler.release(running[1])
    assert [sequence.deadline_s for sequence in scheduler.start_running()] == [4]
    assert [sequence.deadline_s for sequence in scheduler.admit()] == [6]


def test_who_needs_many_rows_is_not_passed_by_for_ever() -> None:
    scheduler = make_scheduler(windows=9, max_batch=4)
    first, second, wide, small = (make_sequence(deadline) for deadline in range(4))
    add(scheduler, first, second)
    fetch(*scheduler.admit())
    assert scheduler.start_running() == [first, second]
    wide.request = replace(wide.request, options=replace(wide.options, beam_size=3))
    add(scheduler, wide, small)
    assert scheduler.admit() == [wide, small]
    assert scheduler.n_without_slots == 2
    wide.fetched = small.fetched = FETCHED
    assert scheduler.start_running() == []
    scheduler.repeat(first)  # has its rows already
    assert scheduler.start_running() == [first]
    scheduler.release(first)
    assert scheduler.start_running() == [wide]
    assert [len(sequence.rows) for sequence in (wide, small)] == [3, 0]
    scheduler.release(second)
    assert scheduler.start_running() == [small]


def test_long_prompts_begin_in_several_steps() -> None:
    scheduler = make_scheduler(windows=3, max_batch=3)
    add(scheduler, *(make_sequence(n_prompt=TOKENS_AT_ONCE // 2) for _ in range(3)))
    fetch(*scheduler.admit())
    assert [len(scheduler.start_running()) for _ in range(4)] == [1, 1, 1, 0]


def test_late_sequences_are_named_until_they_are_answered_also_those_that_came_later() -> None:
    scheduler = make_scheduler(windows=3)
    later, sooner = make_sequence(9.0), make_sequence(5.0)
    scheduler.add(later)
    scheduler.admit()
    assert scheduler.expired(6.0) == []
    scheduler.add(sooner)
    scheduler.admit()
    for _ in range(2):
        assert scheduler.expired(6.0) == [sooner]
    assert scheduler.next_deadline() == 5.0
    sooner.future.set_exception(DeadlineExceededError("late"))
    assert scheduler.next_deadline() == 9.0
    assert scheduler.expired(6.0) == []
    scheduler.release(sooner)
    assert scheduler.expired(6.0) == []
    for _ in range(2):
        assert scheduler.expired(9.0) == [later]


def test_random_lives_return_everything() -> None:
    rng = random.Random(0)
    scheduler = make_scheduler(windows=4, max_batch=3)
    live: list[DecodeSequence] = []
    for _ in range(500):
        action = rng.randrange(4)
        if action == 0:
            live.append(make_sequence(rng.random(), priority=rng.choice(list(URGENCY))))
            scheduler.add(live[-1])
        elif action == 1:
            for sequence in scheduler.admit():
                sequence.fetched = FETCHED if rng.random() < 0.7 else None
        elif action == 2:
            scheduler.start_running()
        elif live:
            scheduler.release(live.pop(rng.randrange(len(live))))
        slots = [row.slot for sequence in live for row in sequence.rows]
        assert len(slots) == len(set(slots)) <= 3
    assert len(scheduler.everything()) == len(live)
    for sequence in live:
        scheduler.release(sequence)
    scheduler.check_integrity()


def test_classes_come_before_deadlines() -> None:
    scheduler = make_scheduler(windows=3, max_batch=3)
    bulk = make_sequence(1.0, priority="bulk")
    clip = make_sequence(2.0)
    live = make_sequence(3.0, priority="live")
    add(scheduler, bulk, clip, live)
    assert scheduler.admit() == [live, clip]
    assert scheduler.next_deadline() == 1.0
    assert scheduler.expired(1.0) == [bulk]
    clip.fetched = live.fetched = FETCHED
    assert scheduler.start_running() == [live, clip]
    scheduler.release(live)
    scheduler.release(clip)
    assert scheduler.admit() == [bulk], "bulk takes half of the pages, or one window's"


def test_live_kv_is_read_though_enough_of_others_waits_for_rows() -> None:
    scheduler = make_scheduler(windows=9, max_batch=2)
    clips = [make_sequence(deadline) for deadline in range(4)]
    add(scheduler, *clips)
    assert scheduler.admit() == clips[:3]
    fetch(*clips)
    assert scheduler.start_running() == clips[:2]
    live = make_sequence(9.0, priority="live")
    scheduler.add(live)
    assert scheduler.admit() == [live]
    live.fetched = FETCHED
    assert scheduler.start_running() == []
    scheduler.release(clips[0])
    assert scheduler.start_running() == [live]


def test_bulk_work_leaves_rows_and_pages_to_whoever_comes() -> None:
    scheduler = make_scheduler(windows=8, max_batch=4)
    bulk = [make_sequence(priority="bulk") for _ in range(8)]
    add(scheduler, *bulk)
    admitted = scheduler.admit()
    assert admitted == bulk[:4], "half of the pages"
    fetch(*bulk)
    assert scheduler.start_running() == bulk[:2], "half of the rows"
    clips = [make_sequence() for _ in range(2)]
    fetch(*clips)
    add(scheduler, *clips)
    assert scheduler.admit() == clips
    assert scheduler.start_running() == clips
    scheduler.release(clips[0])
    assert scheduler.start_running() == [], "three of four rows are taken"
    scheduler.release(clips[1])
    scheduler.release(bulk[0])
    assert scheduler.start_running() == [bulk[2]]


def test_later_windows_of_files_leave_rows_and_pages_to_the_first_of_others() -> None:
    scheduler = make_scheduler(windows=16, max_batch=16)
    tails = [make_sequence(priority="later") for _ in range(16)]
    add(scheduler, *tails)
    assert len(scheduler.admit()) == 14
    fetch(*tails)
    assert len(scheduler.start_running()) == 14
    clip = make_sequence(9.0)
    add(scheduler, clip)
    assert scheduler.admit() == [clip]
    fetch(clip)
    assert scheduler.start_running() == [clip]


def test_no_class_starves_for_rows_or_pages() -> None:
    """Live sequences keep coming, two for each row: an interactive and a bulk one still run."""
    scheduler = make_scheduler(windows=2, max_batch=1)
    clip, bulk = make_sequence(99.0), make_sequence(99.0, priority="bulk")
    scheduler.add(clip)
    scheduler.add(bulk)
    started: list[DecodeSequence] = []
    for _ in range(60):
        for _ in range(2):
            scheduler.add(make_sequence(1.0, priority="live"))
        for sequence in scheduler.admit():
            sequence.fetched = FETCHED
        for sequence in scheduler.start_running():
            started.append(sequence)
            scheduler.release(sequence)
    # Each waits for pages and then for a row, so it may be passed by twice.
    assert started.index(clip) <= 2 * PASSED_BY["interactive"] + 2
    assert started.index(bulk) <= 2 * PASSED_BY["bulk"] + 4


class AnySearch:
    done, runs_ahead = False, False


def running(scheduler: Scheduler, *priorities: Priority) -> list[DecodeSequence]:
    sequences = [make_sequence(priority=priority) for priority in priorities]
    add(scheduler, *sequences)
    fetch(*scheduler.admit())
    assert sorted(map(id, scheduler.start_running())) == sorted(map(id, sequences))
    for sequence in sequences:
        sequence.search = AnySearch()  # type: ignore[assignment]
    return sequences


def test_bulk_rows_pause_while_others_decode_but_not_for_ever() -> None:
    scheduler = make_scheduler(windows=4, max_batch=4)
    bulk, other = running(scheduler, "bulk", "interactive")
    steps = [scheduler.next_step() for _ in range(2 * PASSED_BY["bulk"] + 2)]
    together = [n for n, step in enumerate(steps) if bulk in step]
    assert together == [PASSED_BY["bulk"], 2 * PASSED_BY["bulk"] + 1]
    assert all(other in step for step in steps)
    scheduler.release(other)
    assert scheduler.next_step() == [bulk]


def test_on_a_cpu_live_rows_step_alone_and_the_others_join_in_now_and_then() -> None:
    scheduler = make_scheduler(windows=8, max_batch=8, step_order=ALONE)
    live, clip, bulk = running(scheduler, "live", "interactive", "bulk")
    steps = [scheduler.next_step() for _ in range(3 * STEPS["bulk"])]
    assert all(live in step for step in steps)
    for priority, sequence in (("interactive", clip), ("bulk", bulk)):
        most = STEPS[priority]
        joins = [n for n, step in enumerate(steps) if sequence in step]
        assert joins[0] == most
        assert all(most <= after - before <= most + 1 for before, after in pairwise(joins))
    scheduler.release(bulk)
    while clip not in scheduler.next_step():
        pass
    late = make_sequence()
    add(scheduler, late)
    fetch(*scheduler.admit())
    for _ in range(STEPS["interactive"]):
        assert scheduler.start_running() == [], "a prompt would take as long as a step"
        assert scheduler.next_step() == [live]
    assert scheduler.start_running() == [late]
    scheduler.release(live)
    assert scheduler.next_step() == [clip]


def test_on_a_gpu_live_and_interactive_rows_step_together() -> None:
    scheduler = make_scheduler(windows=4, max_batch=4)
    sequences = running(scheduler, "live", "interactive")
    assert all(scheduler.next_step() == sequences for _ in range(2 * PASSED_BY["bulk"]))
