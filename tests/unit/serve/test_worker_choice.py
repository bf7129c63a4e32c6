"""Windows go to the worker that is done with them first, and next to the KV where that is free."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.messages import (
    CrossKVHandle,
    DecodeOptions,
    DecodeRequest,
    EncodeRequest,
    Location,
    WorkerLoad,
)
from cluster.serve.worker_choice import (
    N_REMEMBERED,
    Candidate,
    WorkLedger,
    key_of,
    ranked,
    shared_key,
    work_of,
)

CHANCE = random.Random(0)
HERE, NEAR, FAR = Location("a", "rack"), Location("b", "rack"), Location("c", "other")
HANDLE = CrossKVHandle("r", 0, 1, "e", b"", "", (), 0, 0, 0, 0, "", 10.0)


def encode_request(
    window: int = 0, audio_key: bytes = b"", *, fresh: bool = False
) -> EncodeRequest:
    pcm = np.zeros(16, np.int16)
    return EncodeRequest("r", window, 1, pcm, 30.0, audio_key=audio_key, fresh=fresh)


def decode_request(beam_size: int = 1, kv_location: Location = HERE) -> DecodeRequest:
    options = DecodeOptions(beam_size=beam_size)
    return DecodeRequest("r", 0, 1, HANDLE, options, 30.0, kv_location=kv_location)


def encoder(key: str, work: float, window_s: float) -> Candidate:
    return Candidate(key, WorkerLoad(window_s=window_s), HERE, work)


def decoder(key: str, work: float, location: Location, capacity: float = 16.0) -> Candidate:
    return Candidate(key, WorkerLoad(capacity=capacity), location, work)


def test_a_slow_encoder_gets_less() -> None:
    slow, fast = encoder("slow", 1, 0.3), encoder("fast", 3, 0.1)
    assert ranked(encode_request(), [slow, fast], CHANCE) == ["fast", "slow"]
    slow, fast = encoder("slow", 0, 0.3), encoder("fast", 3, 0.1)
    assert ranked(encode_request(), [slow, fast], CHANCE) == ["slow", "fast"]


def test_a_new_encoder_is_taken_for_a_usual_one() -> None:
    new, usual = encoder("new", 0, 0.0), encoder("usual", 1, 0.1)
    assert ranked(encode_request(), [usual, new], CHANCE) == ["new", "usual"]


def test_equal_workers_share_the_work() -> None:
    workers = [encoder(name, 0, 0.1) for name in "abc"]
    firsts = Counter(ranked(encode_request(), workers, CHANCE)[0] for _ in range(300))
    assert set(firsts) == set("abc")


def preferred(workers: list[Candidate], audio: int, **options: bool) -> Hashable:
    request = encode_request(0, audio.to_bytes(32, "big"), **options)
    return ranked(request, workers, CHANCE)[0]


def test_the_same_audio_goes_to_the_same_of_the_free_encoders() -> None:
    workers = [encoder(name, 0, 0.1) for name in "abc"]
    own = {audio: preferred(workers, audio) for audio in range(300)}
    assert all(preferred(workers[::-1], audio) == place for audio, place in own.items())
    assert min(Counter(own.values()).values()) > 60, "each has its share"
    fewer = workers[:2]
    assert all(preferred(fewer, a) == place for a, place in own.items() if place != "c")


def test_no_encoder_is_preferred_at_the_price_of_balance() -> None:
    """Times that workers measured differ a little; a window more is more than that."""
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


def test_unique_audio_is_spread_as_evenly_as_without_preference() -> None:
    """Windows arrive at random, and each is at its encoder for a while."""
    peaks = []
    for keyed in (False, True):
        chance, ledger = random.Random(3), WorkLedger()
        running: list[int] = []
        spread = []
        for window in range(2000):
            ledger.begin(window)
            workers = [encoder(name, ledger.work(name), 0.1) for name in "abcd"]
            key = window.to_bytes(32, "big") if keyed else b""
            first = ranked(encode_request(window, key), workers, chance)[0]
            assert ledger.work(first) == min(ledger.work(name) for name in "abcd")
            ledger.send(first, window, 1.0, key)
            running.append(window)
            while len(running) > 10 or (running and chance.random() < 0.3):
                ledger.end(running.pop(chance.randrange(len(running))))
            spread.append(max(ledger.work(name) for name in "abcd"))
        peaks.append(sum(spread) / len(spread))
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)


def test_what_must_be_encoded_anew_goes_to_any_free_encoder() -> None:
    workers = [encoder(name, 0, 0.1) for name in "ab"]
    assert {preferred(workers, 1, fresh=True) for _ in range(50)} == {"a", "b"}
    assert shared_key(encode_request(0, b"k", fresh=True)) == b""
    assert shared_key(decode_request()) == b""
    assert shared_key(encode_request(0)) == b""
    trimmed = replace(encode_request(0, b"k"), context=320)
    assert shared_key(trimmed) != shared_key(encode_request(0, b"k")), "one is not the other's KV"


def test_a_decoder_next_to_the_kv_is_first_while_about_as_empty() -> None:
    far, near, here = decoder("far", 0, FAR), decoder("near", 0, NEAR), decoder("here", 0, HERE)
    assert ranked(decode_request(), [far, near, here], CHANCE) == ["here", "near", "far"]
    here = decoder("here", 3, HERE)
    assert ranked(decode_request(), [far, near, here], CHANCE) == ["near", "here", "far"]
    here, near = decoder("here", 5, HERE), decoder("near", 5, NEAR)
    assert ranked(decode_request(), [far, near, here], CHANCE) == ["far", "here", "near"]


def test_nodes_without_a_domain_are_far_from_one_another() -> None:
    kv_location = Location("a")
    lonely, here = decoder("lonely", 0, Location("b")), decoder("here", 1, Location("a"))
    assert ranked(decode_request(kv_location=kv_location), [lonely, here], CHANCE) == [
        "here",
        "lonely",
    ]


def test_decoders_are_as_full_as_their_capacity_says() -> None:
    small, large = decoder("small", 8, HERE, 16), decoder("large", 16, HERE, 64)
    assert ranked(decode_request(), [small, large], CHANCE) == ["large", "small"]


@pytest.mark.parametrize(
    ("request_", "work"),
    [(encode_request(), 1.0), (decode_request(), 1.0), (decode_request(5), 5.0), (None, 0.0)],
)
def test_work_is_windows_and_hypotheses(request_: Any, work: float) -> None:
    assert work_of(request_) == work


def test_encode_and_decode_of_a_window_are_two_calls() -> None:
    keys = {key_of(encode_request()), key_of(encode_request(1)), key_of(decode_request())}
    assert len(keys) == 3


def counted(ledger: WorkLedger, *workers: Hashable) -> list[float]:
    return [ledger.work(worker) for worker in workers]


def make_ledger(*requests: Hashable) -> WorkLedger:
    """Calls of these requests are in progress."""
    ledger = WorkLedger()
    for request in requests:
        ledger.begin(request)
    return ledger


def test_work_is_counted_from_the_choice_to_the_end() -> None:
    ledger = make_ledger(1, 2)
    ledger.send("a", 1, 5.0)
    ledger.send("a", 2, 1.0)
    assert counted(ledger, "a", "b") == [6.0, 0.0]
    ledger.move("b", 1)
    assert counted(ledger, "a", "b") == [1.0, 5.0]
    ledger.end(1)
    ledger.end(1)
    ledger.move("a", 1)  # its answer was faster than the news of where it went
    ledger.send("a", 1, 5.0)  # Serve had not yet heard that the call was cancelled
    assert counted(ledger, "a", "b") == [1.0, 0.0]
    ledger.send("b", 2, 1.0)  # once more, after a failure
    assert counted(ledger, "a", "b") == [0.0, 1.0]


def test_what_a_worker_tells_of_ones_own_work_is_not_counted_twice() -> None:
    ledger = make_ledger(*range(4))
    for request in range(4):
        ledger.send("a", request, 1.0)
    ledger.report("a", 4.0)
    assert counted(ledger, "a") == [4.0]
    for request in range(3):
        ledger.end(request)
    ledger.report("a", 4.0)  # from before the three had ended
    assert counted(ledger, "a") == [1.0]


def test_work_of_others_is_what_is_beyond_ones_own() -> None:
    ledger = make_ledger(1)
    ledger.send("a", 1, 1.0)
    ledger.report("a", 7.0)
    assert counted(ledger, "a") == [7.0]
    ledger.end(1)
    assert counted(ledger, "a") == [6.0]
    ledger.report("a", 0.0)
    assert counted(ledger, "a") == [0.0]


def test_it_is_remembered_where_audio_was_encoded_last() -> None:
    ledger = make_ledger(*range(N_REMEMBERED + 2))
    assert ledger.kept_at(b"k") is None
    ledger.send("a", 0, 1.0, b"k")
    ledger.keep(0, b"k")
    ledger.end(0)
    assert ledger.kept_at(b"k") == "a"
    ledger.send("b", 1, 1.0)  # encoded anew
    ledger.keep(1, b"k")
    assert ledger.kept_at(b"k") == "b"
    for request in range(2, N_REMEMBERED + 2):
        ledger.send("b", request, 1.0)
        ledger.keep(request, request.to_bytes(4, "big"))
    assert ledger.kept_at(b"k") is None
    assert len(ledger._kept) == N_REMEMBERED


def test_it_is_known_where_the_same_audio_is_encoded() -> None:
    ledger = make_ledger(1, 2, 3)
    assert ledger.place_of(b"k", 1) is None
    ledger.send("a", 1, 1.0, b"k")
    assert ledger.place_of(b"k", 1) is None, "its own call tells nothing"
    assert ledger.place_of(b"k", 2) == "a"
    assert ledger.place_of(b"", 2) is None
    ledger.move("b", 1)
    assert ledger.place_of(b"k", 2) == "b"
    ledger.send("b", 2, 0.0, b"k")
    ledger.end(1)
    assert ledger.place_of(b"k", 3) == "b"
    ledger.end(2)
    assert ledger.place_of(b"k", 3) is None
    assert not ledger._same


def test_a_worker_that_is_gone_leaves_nothing() -> None:
    ledger = make_ledger(1)
    ledger.send("a", 1, 1.0)
    ledger.report("a", 7.0)
    ledger.forget("a")
    assert counted(ledger, "a") == [0.0]
    ledger.end(1)
    ledger.begin(1)
    ledger.send("b", 1, 1.0)
    assert counted(ledger, "a", "b") == [0.0, 1.0]


@pytest.mark.parametrize("window", [encode_request(0, b"k"), decode_request()])
def test_a_worker_that_has_failed_comes_last_however_little_it_has_to_do(window: Any) -> None:
    busy = [Candidate(name, WorkerLoad(), HERE, 9.0) for name in "ab"]
    failed = Candidate("failed", WorkerLoad(failed=True), HERE, 0.0)
    assert ranked(window, [failed, *busy], CHANCE, kept_at="failed")[-1] == "failed"
    assert ranked(window, [failed], CHANCE) == ["failed"], "there is no other to ask"


def test_a_load_survives_the_way_through_serve() -> None:
    load = WorkerLoad(3.0, 16.0, 0.25, failed=True)
    assert WorkerLoad.of_stats(load.as_stats()) == load
    assert WorkerLoad.of_stats({}) == WorkerLoad()


def test_a_trimmed_window_weighs_as_much_as_its_share_of_the_positions() -> None:
    """Five short windows wait less than one full one."""
    busy, short = encoder("busy", 1.0, 0.1), encoder("short", 5 * 192 / 1500, 0.1)
    request = replace(encode_request(), context=192)
    assert work_of(request) == pytest.approx(192 / 1500)
    assert ranked(request, [busy, short], random.Random(1)) == ["short", "busy"]
    full = encode_request()
    assert work_of(full) == 1.0
    fast, slow = encoder("fast", 2.0, 0.1), encoder("slow", 0.5, 0.21)
    assert ranked(full, [fast, slow], random.Random(1))[0] == "fast"
    assert ranked(request, [fast, slow], random.Random(1))[0] == "slow"
