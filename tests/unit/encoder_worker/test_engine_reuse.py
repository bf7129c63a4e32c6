"""The same audio is encoded once: kept KV, windows in flight together, and whose they are."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.common.errors import SequenceFailedError
from cluster.common.messages import CrossKVHandle, EncodeReply
from tests.support.kv.ends import wait_until
from tests.support.references.hugging_face import make_pcm
from tests.support.workers.encoder_engines import PATIENCE_S, Bench, MakeBench

PCM = make_pcm(0.3, seed=5)
OTHER = make_pcm(0.3, seed=6)


def send(
    b: Bench,
    audio_key: bytes = b"a",
    pcm: NDArray[np.int16] = PCM,
    *,
    name: str = "r",
    **options: Any,
) -> Future[EncodeReply]:
    return b.submit(pcm, name, audio_key=audio_key, **options)


def hold(b: Bench) -> Future[EncodeReply]:
    return b.hold("r", PCM, audio_key=b"a")


def reply_of(future: Future[EncodeReply]) -> EncodeReply:
    return future.result(PATIENCE_S)


def read(b: Bench, reply: EncodeReply, pcm: NDArray[np.int16] = PCM) -> CrossKVHandle:
    """As a decoder: look, then release."""
    assert (b.kv(reply.handle) - b.expected_kv(pcm)).abs().max() < 1e-5
    assert b.engine.revoke(reply.handle)
    return reply.handle


def counts(b: Bench) -> tuple[int, int]:
    stats = b.engine.stats()
    return stats.hits, stats.misses


def idle(b: Bench) -> None:
    assert b.engine.drain(PATIENCE_S)
    b.exporter.check_integrity()


def test_the_same_audio_again_is_answered_from_its_pages(bench: MakeBench) -> None:
    b = bench()
    first = reply_of(send(b))
    assert first.reused is False
    read(b, first)
    assert b.engine.stats().pages_free == b.engine.stats().pages_total
    again = reply_of(send(b, name="another"))
    assert again.reused is True
    assert again.timings.encode_s == 0.0
    assert read(b, again).addresses == first.handle.addresses
    assert b.batch_sizes == [1]
    assert counts(b) == (1, 1)
    assert b.engine.stats().kept == 1
    assert b.engine.stats().kept_bytes == b.exporter.layout.page_bytes
    idle(b)


def test_another_encoder_context_of_the_same_audio_is_encoded_too(bench: MakeBench) -> None:
    b = bench()
    for context, reused in ((0, False), (500, False), (0, True), (500, True)):
        reply = reply_of(send(b, context=context))
        assert reply.reused is reused
        assert reply.handle.frames == (context or b.exporter.layout.n_frames)
        assert b.engine.revoke(reply.handle)
    idle(b)


def test_without_a_key_or_with_the_setting_off_nothing_is_kept(bench: MakeBench) -> None:
    for b, key in ((bench(), b""), (bench(cache=False), b"a")):
        for _ in range(2):
            reply = reply_of(send(b, key))
            assert reply.reused is None
            read(b, reply)
        assert b.batch_sizes == [1, 1]
        assert counts(b) == (0, 0)
        idle(b)
        b.exporter.pool.check_integrity()


def test_windows_that_wait_together_are_encoded_once(bench: MakeBench) -> None:
    b = bench(n_windows=8)
    held = b.hold()
    same = [send(b, name=f"r{n}") for n in range(4)]
    other = send(b, b"b", OTHER)
    assert b.engine.stats().queued == 2, "windows that need an encode each"
    b.gate.set()
    replies = [reply_of(future) for future in same]
    assert [reply.reused for reply in replies] == [False, True, True, True]
    assert len({reply.handle.lease for reply in replies}) == 4
    assert [reply.handle.request_id for reply in replies] == ["r0", "r1", "r2", "r3"]
    assert b.engine.stats().read == 3
    for reply in replies:
        read(b, reply)
    read(b, reply_of(other), OTHER)
    b.engine.revoke(reply_of(held).handle)
    assert b.batch_sizes == [1, 2]
    assert counts(b) == (3, 2)
    idle(b)


@pytest.mark.parametrize("where", ["queued", "running"])
def test_a_cancelled_window_does_not_take_those_with_it_that_wait_for_it(
    bench: MakeBench, where: str
) -> None:
    b = bench()
    if where == "queued":
        blocker, leader = b.hold(), send(b)
    else:
        blocker, leader = None, hold(b)
    follower = send(b)
    assert b.engine.stats().queued == (where == "queued")
    assert leader.cancel()
    b.gate.set()
    read(b, reply_of(follower))
    if blocker is not None:
        b.engine.revoke(reply_of(blocker).handle)
    assert b.batch_sizes == [1] * (2 if where == "queued" else 1)
    idle(b)


def test_what_was_encoded_for_nobody_is_there_when_the_client_comes_again(bench: MakeBench) -> None:
    b = bench()
    assert hold(b).cancel()
    b.gate.set()
    wait_until(lambda: b.engine.stats().kept == 1)
    again = reply_of(send(b))
    assert again.reused is True
    read(b, again)
    idle(b)


def test_those_that_wait_for_a_window_that_fails_are_encoded_themselves(bench: MakeBench) -> None:
    b = bench()
    b.poison = len(PCM)
    leader = hold(b)
    follower = send(b)
    passed: list[int] = []
    leader.add_done_callback(lambda _: setattr(b, "poison", None) or passed.append(1))
    b.gate.set()
    with pytest.raises(SequenceFailedError):
        reply_of(leader)
    reply = reply_of(follower)
    assert reply.reused is False
    read(b, reply)
    assert passed
    idle(b)


def test_those_that_wait_have_the_kv_before_anybody_can_take_its_pages(bench: MakeBench) -> None:
    """On a CPU the thread that encodes bulk windows reserves pages of the same pool."""
    b = bench(n_windows=1)
    leader = hold(b)
    follower = send(b)
    taken: list[object] = []

    def take_pages(_: object) -> None:
        assert b.engine.revoke(leader.result().handle)
        taken.append(b.exporter.reserve(b.exporter.pool.n_pages))

    leader.add_done_callback(take_pages)
    b.gate.set()
    reply = reply_of(follower)
    assert reply.reused is True
    wait_until(lambda: taken == [None])
    read(b, reply)
    idle(b)


def test_a_fresh_encode_replaces_what_was_kept(bench: MakeBench) -> None:
    """A decoder could not read the KV: whatever was wrong with it, nobody gets it again."""
    b = bench()
    lost = read(b, reply_of(send(b)))
    fresh = reply_of(send(b, fresh=True))
    assert fresh.reused is False
    assert counts(b) == (0, 2)
    handle = read(b, fresh)
    page = b.exporter.pool.page_at(lost.addresses[0])
    assert b.exporter.counters[page] != lost.generation
    again = reply_of(send(b))
    assert again.reused is True
    assert read(b, again).addresses == handle.addresses
    idle(b)


def test_a_full_pool_still_answers_what_it_holds(bench: MakeBench) -> None:
    """A further lease takes no page, so it does not wait behind windows that need some."""
    b = bench(n_windows=1)
    first = reply_of(send(b))
    waiting = send(b, b"b", OTHER)
    again = reply_of(send(b))
    assert again.reused is True
    assert b.engine.stats().signals(0.0).unread == 1.0
    assert not waiting.done()
    for reply in (first, again):
        read(b, reply)
    read(b, reply_of(waiting), OTHER)
    idle(b)
