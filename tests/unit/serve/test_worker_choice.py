"""Windows go to the worker that is done with them first, and next to the KV where that is free."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.common.messages import (
    CrossKVHandle,
    DecodeOptions,
    DecodeRequest,
    EncodeRequest,
    WorkerLoad,
)
from cluster.serve.own_calls import FORGIVEN_S, HEARD_S, N_REMEMBERED, OwnCalls, key_of
from cluster.serve.worker_choice import (
    FEW,
    N_NEAR,
    N_SAMPLED,
    Candidate,
    Members,
    ranked,
    shared_key,
    work_of,
)

CHANCE = random.Random(0)
HERE, FAR = "a", "b"
HANDLE = CrossKVHandle("r", 0, 1, "e", b"", "", (), 0, 0, 0, 0, "", 10.0)


def encode_request(
    window: int = 0, audio_key: bytes = b"", *, fresh: bool = False
) -> EncodeRequest:
    pcm = np.zeros(16, np.int16)
    return EncodeRequest("r", window, 1, pcm, 30.0, audio_key=audio_key, fresh=fresh)


def decode_request(beam_size: int = 1, kv_node: str = HERE) -> DecodeRequest:
    options = DecodeOptions(beam_size=beam_size)
    return DecodeRequest("r", 0, 1, HANDLE, options, 30.0, kv_node=kv_node)


def encoder(key: str, work: float, window_s: float) -> Candidate:
    return Candidate(key, WorkerLoad(work, window_s=window_s), HERE)


def decoder(key: str, work: float, node: str, capacity: float = 16.0) -> Candidate:
    return Candidate(key, WorkerLoad(work, capacity), node)


def test_a_slow_encoder_gets_less() -> None:
    slow, fast = encoder("slow", 1, 0.3), encoder("fast", 3, 0.1)
    assert ranked(encode_request(), [slow, fast], CHANCE) == ["fast", "slow"]
    slow, fast = encoder("slow", 0, 0.3), encoder("fast", 3, 0.1)
    assert ranked(encode_request(), [slow, fast], CHANCE) == ["slow", "fast"]


@pytest.mark.parametrize("measured_s", [(0.1, 0.1, 0.1), (0.1, 0.104, 0.097)])
def test_equal_workers_share_the_work(measured_s: tuple[float, ...]) -> None:
    workers = [encoder(name, 0, time_s) for name, time_s in zip("abc", measured_s, strict=True)]
    firsts = Counter(ranked(encode_request(), workers, CHANCE)[0] for _ in range(300))
    assert all(firsts[name] > 60 for name in "abc")


def preferred(workers: list[Candidate], audio: int, **options: bool) -> Hashable:
    request = encode_request(0, audio.to_bytes(32, "big"), **options)
    return ranked(request, workers, CHANCE)[0]


def test_no_encoder_is_preferred_at_the_price_of_balance() -> None:
    for work in (0, 1, 7):
        busy, free = encoder("busy", work + 1, 0.1), encoder("free", work, 0.1)
        assert {preferred([busy, free], audio) for audio in range(30)} == {"free"}
    quick, slow = encoder("quick", 0, 0.1), encoder("slow", 0, 0.14)
    assert {preferred([quick, slow], audio) for audio in range(30)} == {"quick", "slow"}
    slow = encoder("slow", 0, 0.16)
    assert {preferred([quick, slow], audio) for audio in range(30)} == {"quick"}


def test_audio_goes_where_this_process_had_it_encoded_unless_that_is_much_busier() -> None:
    for work, first in ((0, "kept"), (2, "kept"), (3, "free")):
        kept, free = encoder("kept", work, 0.1), encoder("free", 0, 0.1)
        firsts = {
            ranked(encode_request(0, bytes([n])), [kept, free], CHANCE, "kept")[0]
            for n in range(30)
        }
        assert firsts == {first}
    firsts = {
        ranked(encode_request(0, bytes([n])), [encoder("free", 0, 0.1)], CHANCE, "gone")[0]
        for n in range(3)
    }
    assert firsts == {"free"}
    fresh = encode_request(0, b"k", fresh=True)
    workers = [encoder("kept", 1, 0.1), encoder("free", 0, 0.1)]
    assert ranked(fresh, workers, CHANCE, "kept")[0] == "free"


def test_what_must_be_encoded_anew_goes_to_any_free_encoder() -> None:
    workers = [encoder(name, 0, 0.1) for name in "ab"]
    assert {preferred(workers, 1, fresh=True) for _ in range(50)} == {"a", "b"}
    assert shared_key(encode_request(0, b"k", fresh=True)) == b""
    assert shared_key(decode_request()) == b""
    assert shared_key(encode_request(0)) == b""
    trimmed = replace(encode_request(0, b"k"), context=320)
    assert shared_key(trimmed) != shared_key(encode_request(0, b"k")), "one is not the other's KV"


def test_a_decoder_next_to_the_kv_is_first_while_about_as_empty() -> None:
    far, here = decoder("far", 0, FAR), decoder("here", 3, HERE)
    assert ranked(decode_request(), [far, here], CHANCE) == ["here", "far"]
    here = decoder("here", 5, HERE)
    assert ranked(decode_request(), [far, here], CHANCE) == ["far", "here"]


def test_decoders_are_as_full_as_their_capacity_says() -> None:
    small, large = decoder("small", 8, HERE, 16), decoder("large", 16, HERE, 64)
    assert ranked(decode_request(), [small, large], CHANCE) == ["large", "small"]


def counted(calls: OwnCalls, *workers: Hashable) -> list[float]:
    return [calls.load(worker).work for worker in workers]


def make_calls(*requests: Hashable) -> OwnCalls:
    calls = OwnCalls()
    for request in requests:
        calls.begin(request)
    return calls


def test_work_is_counted_from_the_choice_to_the_end() -> None:
    calls = make_calls(1, 2)
    calls.send("a", 1, 5.0)
    calls.send("a", 2, 1.0)
    assert counted(calls, "a", "b") == [6.0, 0.0]
    calls.move("b", 1)
    assert counted(calls, "a", "b") == [1.0, 5.0]
    calls.end(1)
    calls.end(1)
    calls.move("a", 1)  # its answer was faster than the news of where it went
    calls.send("a", 1, 5.0)  # Serve had not yet heard that the call was cancelled
    assert counted(calls, "a", "b") == [1.0, 0.0]
    calls.send("b", 2, 1.0)  # once more, after a failure
    assert counted(calls, "a", "b") == [0.0, 1.0]


def test_work_of_others_is_what_an_answer_has_beyond_ones_own_until_it_is_old() -> None:
    clock = Clock()
    calls = OwnCalls(clock)
    for call in (1, 2):
        calls.begin(call)
        calls.send("a", call, 1.0)
    calls.answered(1, WorkerLoad(7.0, 16.0))
    calls.end(1)
    assert calls.load("a") == WorkerLoad(7.0, 16.0), "one of its own, and six of others"
    clock.now_s += HEARD_S
    assert counted(calls, "a") == [1.0 + 3.0]
    calls.answered(2, WorkerLoad(0.0, 16.0))
    calls.end(2)
    assert counted(calls, "a") == [0.0]


def test_it_is_remembered_where_audio_was_encoded_last() -> None:
    calls = make_calls(*range(N_REMEMBERED + 2))
    assert calls.kept_at(b"k") is None
    calls.send("a", 0, 1.0, b"k")
    calls.answered(0, None, b"k")
    calls.end(0)
    assert calls.kept_at(b"k") == "a"
    calls.send("b", 1, 1.0)  # encoded anew
    calls.answered(1, None, b"k")
    assert calls.kept_at(b"k") == "b"
    for request in range(2, N_REMEMBERED + 2):
        calls.send("b", request, 1.0)
        calls.answered(request, None, request.to_bytes(4, "big"))
    assert calls.kept_at(b"k") is None
    assert len(calls._kept) == N_REMEMBERED


def test_a_worker_that_is_gone_leaves_nothing() -> None:
    calls = make_calls(1)
    calls.send("a", 1, 1.0)
    calls.answered(1, WorkerLoad(7.0), b"k")
    calls.failed(1, is_worker_s_fault=True)
    assert calls.kept_at(b"k") == "a"
    calls.forget("a")
    assert calls.kept_at(b"k") is None, "its KV went with it"
    assert calls.trouble("a") == 0.0
    assert counted(calls, "a") == [0.0]
    calls.end(1)
    calls.begin(1)
    calls.send("b", 1, 1.0)
    assert counted(calls, "a", "b") == [0.0, 1.0]


@pytest.mark.parametrize("window", [encode_request(0, b"k"), decode_request()])
def test_a_window_comes_last_where_it_failed_however_little_there_is_to_do(window: Any) -> None:
    busy = [Candidate(name, WorkerLoad(9.0), HERE) for name in "ab"]
    failed = Candidate("failed", WorkerLoad(), HERE)
    assert ranked(window, [failed, *busy], CHANCE, "failed", {"failed"})[-1] == "failed"
    assert ranked(window, [failed], CHANCE, None, {"failed"}) == ["failed"], "there is no other"


def test_one_failure_is_a_little_work_and_failures_alone_are_without_bound() -> None:
    clock = Clock()
    calls = OwnCalls(clock)
    trouble = []
    for call in range(30):
        calls.begin(call)
        calls.send("a", call, 1.0)
        calls.failed(call, is_worker_s_fault=True)
        calls.end(call)
        trouble.append(calls.trouble("a"))
    assert trouble[0] < 0.5
    assert trouble == sorted(trouble)
    assert trouble[-1] > 1000.0
    assert calls.failed_at(29) == {"a"}
    clock.now_s += FORGIVEN_S
    assert calls.trouble("a") == pytest.approx(1.0, rel=0.01)
    calls.begin(30)
    calls.send("a", 30, 1.0)
    calls.answered(30, None)
    assert calls.trouble("a") < 0.7
    calls.failed(30, is_worker_s_fault=False)
    assert calls.trouble("a") < 0.7
    assert calls.failed_at(30) == {"a"}, "its next try goes elsewhere all the same"


def test_a_next_try_goes_elsewhere_until_the_window_is_done() -> None:
    calls, members = OwnCalls(), Members({"a": HERE, "b": HERE})
    first = encode_request(0, b"k")
    calls.begin(key_of(first))
    (place, other) = members.choose(first, calls, CHANCE)
    calls.failed(key_of(first), is_worker_s_fault=False)
    calls.end(key_of(first))
    again = replace(first, attempt=2)
    calls.begin(key_of(again))
    assert members.choose(again, calls, CHANCE) == [other, place]
    calls.answered(key_of(again), None)
    assert calls.failed_at(key_of(again)) == {place}, "it may have to be encoded once more"
    calls.answered(key_of(replace(decode_request(), attempt=2)), None)
    assert calls.failed_at(key_of(again)) == set()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def many(count: int, per_node: int = 1) -> Members:
    return Members({n: f"node-{n // per_node}" for n in range(count)})


@pytest.mark.parametrize("count", [1, 2, FEW, FEW + 1, 17, 10_000])
def test_few_are_compared_however_many_there_are_and_the_owner_always_is(count: int) -> None:
    members, calls = many(count), OwnCalls()
    for audio in range(50):
        request = encode_request(audio, audio.to_bytes(32, "big"))
        order = members.choose(request, calls, CHANCE)
        assert len(set(order)) == len(order) <= max(FEW, N_SAMPLED + 1)
        assert len(order) >= min(count, N_SAMPLED)
        assert order[0] == members.owner(shared_key(request)), "all are free"


@pytest.mark.parametrize("count", [2, 17, 400])
def test_only_audio_of_a_worker_that_left_goes_elsewhere(count: int) -> None:
    n_keys = 1000
    keys = [n.to_bytes(32, "big") for n in range(n_keys)]
    owners = [many(count).owner(key) for key in keys]
    mean = n_keys / count
    assert max(Counter(owners).values()) < mean + 6 * mean**0.5 + 3
    places = {n: HERE for n in reversed(range(count)) if n != 1}
    fewer = Members(places)
    assert [fewer.owner(k) for k, one in zip(keys, owners, strict=True) if one != 1] == [
        one for one in owners if one != 1
    ]


def test_decoders_beside_the_kv_are_compared_and_preferred() -> None:
    members, calls = many(1000, per_node=4), OwnCalls()
    firsts = set()
    for window in range(40):
        request = replace(decode_request(kv_node="node-30"), window=window)
        calls.begin(key_of(request))
        order = members.choose(request, calls, CHANCE)
        assert len(order) <= N_NEAR + N_SAMPLED
        firsts.add(order[0])
        calls.end(key_of(request))
    assert firsts == {120, 121, 122, 123}


@pytest.mark.parametrize("count", [2, 1000])
def test_the_same_audio_in_flight_is_not_joined_at_a_worker_that_fails(count: int) -> None:
    calls, members = OwnCalls(), many(count)
    one, other = encode_request(0, b"k"), encode_request(1, b"k")
    for request in (one, other):
        calls.begin(key_of(request))
    place = members.choose(one, calls, CHANCE)[0]
    assert members.choose(other, calls, CHANCE)[0] == place
    assert counted(calls, place) == [1.0]
    for call in range(5):
        calls.begin(call)
        calls.send(place, call, 0.0)
        calls.failed(call, is_worker_s_fault=True)
        calls.end(call)
    third = encode_request(2, b"k")
    calls.begin(key_of(third))
    assert members.choose(third, calls, CHANCE)[0] != place


HOLD_S = 0.05  # of one window at an encoder


def mean_wait(workers: int, routers: int, windows: int, *, at_random: bool = False) -> float:
    """Holds that a window waits where routers send nine tenths of what the encoders can do."""
    chance, now_s = random.Random(1), 0.0
    per_s = 0.9 * workers / HOLD_S
    arrivals = [*itertools.accumulate(chance.expovariate(per_s) for _ in range(windows))]
    every = [OwnCalls(lambda: now_s) for _ in range(routers)]
    members = Members({n: f"node-{n}" for n in range(workers)})
    queue, free_s, waits = [0] * workers, [0.0] * workers, []
    ends: list[tuple[float, int, EncodeRequest, OwnCalls, int]] = []
    for number, at_s in enumerate(arrivals):
        while ends and ends[0][0] <= at_s:
            now_s, _, request, calls, worker = heapq.heappop(ends)
            queue[worker] -= 1
            load = WorkerLoad(queue[worker], window_s=HOLD_S)
            calls.answered(key_of(request), load, request.kept_key)
            calls.end(key_of(request))
        now_s, key = at_s, random.Random(number).randbytes(32)
        pcm = np.zeros(1, np.int16)
        request = EncodeRequest(str(number), 0, 1, pcm, 30.0, audio_key=key)
        calls = every[chance.randrange(routers)]
        calls.begin(key_of(request))
        worker = chance.randrange(workers)
        if not at_random:
            worker = members.choose(request, calls, chance)[0]  # type: ignore[assignment]
        queue[worker] += 1
        begins_s = max(now_s, free_s[worker])
        waits.append(begins_s - now_s)
        free_s[worker] = begins_s + HOLD_S
        heapq.heappush(ends, (begins_s + HOLD_S, number, request, calls, worker))
    late = waits[windows // 5 :]  # from when the queues are as long as they get
    return sum(late) / len(late) / HOLD_S


@pytest.mark.parametrize(
    ("workers", "routers", "bound"),
    [
        (2, 1, 2.5),
        (2, 2, 2.5),
        (17, 2, 1.5),
        (64, 4, 1.5),
        pytest.param(400, 8, 2.0, marks=pytest.mark.slow),
        pytest.param(1000, 4, 2.0, marks=pytest.mark.slow),
    ],
)
def test_work_is_balanced_far_better_than_by_chance(
    workers: int, routers: int, bound: float
) -> None:
    windows = min(max(3000, 50 * workers), 20_000)
    assert mean_wait(workers, routers, windows) < bound
    if workers >= 64:
        assert mean_wait(workers, routers, 100 * workers, at_random=True) > 3.0


def test_a_trimmed_window_weighs_as_much_as_its_share_of_the_positions() -> None:
    busy, short = encoder("busy", 1.0, 0.1), encoder("short", 5 * 192 / 1500, 0.1)
    request = replace(encode_request(), context=192)
    assert work_of(request) == pytest.approx(192 / 1500)
    assert ranked(request, [busy, short], random.Random(1)) == ["short", "busy"]
    full = encode_request()
    assert work_of(full) == 1.0
    fast, slow = encoder("fast", 2.0, 0.1), encoder("slow", 0.5, 0.21)
    assert ranked(full, [fast, slow], random.Random(1))[0] == "fast"
    assert ranked(request, [fast, slow], random.Random(1))[0] == "slow"
