"""However an audio worker ends or stands still: none stays behind, and no upload pays for it.

A coroutine is cancelled at each of its suspensions in turn, both while it waits and when what it
waits for is there already but it has not run since: a task that is cancelled then gets both.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.common.errors import ConfigurationError, InvalidAudioError
from cluster.common.messages import SAMPLE_RATE
from cluster.common.settings import RouterSettings, SpeakerSettings
from router.audio.pool import AudioPool
from router.audio.protocol import MAX_MESSAGE_BYTES, SpeakerSearch
from router.audio.worker_handle import BOOT
from router.interface import Progress, RequestContext
from tests.support.audio.audio_pools import freeze_on, pids, request, running, until
from tests.support.audio.sounds import voice, write_wav
from tests.support.speaker_networks import write_network

# Both hang up at once. One then ends by itself, the other only when it is killed.
HANGS_UP = "import os, sys; os.close(int(sys.argv[2]))"
STAYS = HANGS_UP + "; import time; time.sleep(60)"
REPORT = '{"kind": "report", "upload_id": 1, "busy_s": %s, "event": %s}'
NONSENSE = (
    "[]",
    "{}",
    '{"kind": "finished"}',
    "7",
    "{",
    REPORT % ("NaN", '{"kind": "opened", "expected_s": 1.0}'),
    REPORT % ("0.0", '{"kind": "opened", "expected_s": NaN}'),
    REPORT % ("0.0", '{"kind": "opened", "expected_s": 1e300}'),
    REPORT % ("0.0", '{"kind": "opened", "expected_s": "1"}'),
    REPORT % ("0.0", '{"kind": "finished", "n_samples": -1}'),
    " " * (MAX_MESSAGE_BYTES + 1),
)


def head(text: str) -> bytes:
    return len(text).to_bytes(4) + text[:1000].encode()


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def sockets() -> int:
    return sum(
        os.readlink(entry.path).startswith("socket:")
        for entry in os.scandir("/proc/self/fd")
        if os.path.islink(entry.path)
    )


@contextlib.asynccontextmanager
async def nothing_stays() -> AsyncIterator[None]:
    """No process, dead or alive, and no socket is left that was not there before."""
    before, n_sockets = children(), sockets()
    yield
    await until(lambda: not children() - before)
    await until(lambda: sockets() <= n_sockets)


@types.coroutine
def cancelled_at(
    step: int, late: bool, coroutine: Coroutine[Any, Any, object]
) -> Generator[Any, Any, bool]:
    """Await `coroutine`, cancelling this task at the coroutine's suspension number `step`.

    late: only when what it waits for is done.

    Returns whether the coroutine ended before it came that far.
    """
    task = asyncio.current_task()
    assert task is not None
    thrown: asyncio.CancelledError | None = None
    for index in itertools.count():
        try:
            awaited = coroutine.send(None) if thrown is None else coroutine.throw(thrown)
        except StopIteration:
            return index <= step
        if index == step and late and awaited is not None:
            awaited.add_done_callback(lambda _: task.cancel())
        elif index == step:
            task.cancel()
        thrown = None
        try:
            yield awaited
        except asyncio.CancelledError as cancelled:
            thrown = cancelled
    raise AssertionError("unreachable")


async def cancel_everywhere(
    late: bool,
    scene: Callable[[], contextlib.AbstractAsyncContextManager[Coroutine[Any, Any, object]]],
) -> int:
    """Play the scene again and again, its coroutine cancelled one suspension later each time.

    Returns the number of its suspensions.
    """
    for step in itertools.count():
        async with nothing_stays(), scene() as coroutine:
            task = asyncio.ensure_future(cancelled_at(step, late, coroutine))
            (ended,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            assert ended is True or isinstance(ended, ConfigurationError), ended
            return step
    raise AssertionError("unreachable")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("boot", [HANGS_UP, STAYS], ids=["hangs up", "stays"])
async def test_a_worker_ends_wherever_its_keeper_is_cancelled(
    boot: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.audio.worker_handle.BOOT", boot)
    monkeypatch.setattr("router.audio.pool.EXIT_TIMEOUT_S", 0.2)

    @contextlib.asynccontextmanager
    async def scene() -> AsyncIterator[Coroutine[Any, Any, object]]:
        pool = AudioPool(RouterSettings(audio_workers=1))
        yield pool._keep_worker()
        await pool.close()

    # At the least the connection, the hang-up and the end of the process.
    assert await cancel_everywhere(late, scene) >= 3


@pytest.mark.parametrize("late", [False, True])
async def test_workers_end_wherever_their_pool_s_end_is_cancelled(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.audio.worker_handle.BOOT", STAYS)
    monkeypatch.setattr("router.audio.pool.EXIT_TIMEOUT_S", 0.2)

    @contextlib.asynccontextmanager
    async def scene() -> AsyncIterator[Coroutine[Any, Any, object]]:
        pool = AudioPool(RouterSettings(audio_workers=2))
        pool._tasks = [asyncio.create_task(pool._keep_worker()) for _ in range(2)]
        await until(lambda: len(pool._workers) == 2)
        yield pool.close()

    assert await cancel_everywhere(late, scene) >= 2


@pytest.mark.parametrize("pause_s", [0.0, 0.001, 0.01, 0.05])
async def test_a_worker_whose_start_is_given_up_ends(pause_s: float) -> None:
    async with nothing_stays():
        starting = asyncio.ensure_future(AudioPool(RouterSettings(audio_workers=1)).start())
        await asyncio.sleep(pause_s)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


@pytest.mark.parametrize("nonsense", NONSENSE, ids=lambda text: text[:50].strip())
async def test_a_worker_that_sends_nonsense_is_replaced(
    nonsense: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = '{"kind": "ready"}'
    sends = "".join(f"s.sendall({head(text)!r}); " for text in (ready, nonsense))
    boot = f"import socket, sys; s = socket.socket(fileno=int(sys.argv[2])); {sends}"
    monkeypatch.setattr("router.audio.worker_handle.BOOT", boot + "s.recv(1)")
    async with nothing_stays():
        pool = AudioPool(RouterSettings(audio_workers=1))
        keeper = asyncio.create_task(pool._keep_worker())
        pool._tasks = [keeper]
        await until(lambda: bool(pool._workers))
        (first,) = pool._workers
        await until(lambda: bool(pool._workers) and pool._workers[0] is not first)
        assert not keeper.done()
        await pool.close()


# ---- workers that stand still ----


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.audio.pool.STALLED_LOOKS", 2)


@pytest.mark.usefixtures("hasty")
async def test_a_worker_frozen_while_idle_is_replaced(tmp_path: Path) -> None:
    clip = write_wav(tmp_path / "clip", voice(2.0))
    async with running() as pool:
        (frozen,) = pids(pool)
        os.kill(frozen, signal.SIGSTOP)
        async with pool.open(clip, request()) as stream:
            windows = [window async for window in stream]
        assert len(windows) == 1
        assert frozen not in pids(pool)


@pytest.mark.usefixtures("hasty")
async def test_an_upload_goes_on_where_its_frozen_worker_stopped(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "long", voice(400.0))
    async with running() as pool:
        async with pool.open(path, request()) as stream:
            expected = [window.start_sample async for window in stream]
        async with pool.open(path, request()) as stream:
            found = [(await anext(stream)).start_sample]
            frozen = await freeze_on(pool, stream)
            found += [window.start_sample async for window in stream]
        assert found == expected
        assert frozen not in pids(pool)


@pytest.mark.usefixtures("hasty")
async def test_a_frozen_worker_is_waited_for_while_windows_of_others_end(tmp_path: Path) -> None:
    """They may be what keeps it: the request has as long from the last of them on."""
    path = write_wav(tmp_path / "upload", voice(1.0))
    context = RequestContext("r", None, stall_s=0.01, progress=Progress(ended_s=math.inf))
    async with running() as pool:
        (frozen,) = pids(pool)
        os.kill(frozen, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.2, os.kill, frozen, signal.SIGCONT)
        async with pool.open(path, context) as stream:
            assert [window.n_samples async for window in stream] == [SAMPLE_RATE]


async def test_a_worker_that_waits_for_a_core_is_not_taken_for_a_frozen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bulk work has a core while nobody else wants it: on a busy machine for 3 ms of a second."""
    told: Any = types.SimpleNamespace(cpu_times=lambda: (1.0, 1.0))
    async with running() as pool:
        (worker,) = pool._workers
        async with pool.open(write_wav(tmp_path / "long", voice(100.0)), request()) as stream:
            assert stream.wants_work
            with monkeypatch.context() as patched:
                patched.setattr(psutil, "Process", lambda _: told)
                told.status = lambda: psutil.STATUS_RUNNING
                assert [worker.n_still() for _ in range(3)] == [0, 0, 0]
                told.status = lambda: psutil.STATUS_SLEEPING
                assert [worker.n_still() for _ in range(3)] == [1, 2, 3]
        with monkeypatch.context() as patched:
            patched.setattr(psutil, "Process", lambda _: told)
            assert worker.n_still() == 0, "it has no work"


async def test_a_search_has_hours_and_a_step_of_it_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spin = "import router.audio.voices as v; v.find_turns = lambda *_: any(iter(int, 1))"
    boot = BOOT.replace("main()", f"{spin}; main()")
    monkeypatch.setattr("router.audio.worker_handle.BOOT", boot)
    speakers = SpeakerSettings(model=str(write_network(tmp_path / "voices.onnx")))
    pool = AudioPool(RouterSettings(audio_workers=1, audio_timeout_s=2.0), speakers=speakers)
    await pool.start()
    with pytest.raises(InvalidAudioError, match="longer than 2 s"):
        await pool.survey(write_wav(tmp_path / "clip", voice(2.0)), request(), SpeakerSearch())
    await pool.close()
