"""Broken uploads through the whole server: a 200 or a typed 4xx for each, and no harm to others.

Seeded: a failure names its case, which `broken(case)` makes again.
"""

from __future__ import annotations

import concurrent.futures
import functools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from router.api.responses import ErrorResponse
from tests.e2e.conftest import wait_until
from tests.support.audio.bombs import bombs
from tests.support.audio.sounds import FORMATS, encode_as, tone
from tests.support.audio.speech import sentence_pcm, sentences_of, wav_of
from tests.support.in_process import in_process_server

ANSWER_S = 60.0
AT_ONCE = 4
N_WORKERS = 2
GOOD_EVERY = 12  # of so many uploads one is another caller's good one
HEAD_BYTES = 512  # where containers keep their sizes and rates
BOMB_BYTES = 4_000_000
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)

Record = Callable[[str, int], None]
Mutation = Callable[[bytearray, random.Random], bytes]


@functools.cache
def base_files(speech: bool = True) -> dict[str, bytes]:
    pcm = sentence_pcm("short", 1, margin_s=0.4) if speech else tone(2.0)
    with tempfile.TemporaryDirectory() as folder:
        return {name: encode_as(name, Path(folder), pcm).read_bytes() for name in FORMATS}


def truncated(data: bytearray, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return bytes(data[at:] if dice.random() < 0.2 else data[:at])


def flipped(data: bytearray, dice: random.Random) -> bytes:
    reach = len(data) if dice.random() < 0.5 else min(HEAD_BYTES, len(data))
    for _ in range(dice.choice((1, 2, 8, 40, 200))):
        data[dice.randrange(reach)] ^= 1 << dice.randrange(8)
    return bytes(data)


def lying(data: bytearray, dice: random.Random) -> bytes:
    for _ in range(dice.choice((1, 1, 2, 4))):
        width = dice.choice((1, 2, 4, 8))
        value = dice.choice(EXTREMES) % (1 << 8 * width)
        at = dice.randrange(min(HEAD_BYTES, len(data)) - width)
        data[at : at + width] = value.to_bytes(width, dice.choice(("big", "little")))
    return bytes(data)


def repeated(data: bytearray, dice: random.Random) -> bytes:
    first, last = sorted(dice.randrange(len(data)) for _ in range(2))
    piece = dice.choice((2 * data[first:last], bytearray(), bytearray(last - first)))
    return bytes(data[:first] + piece + data[last:])


def spliced(data: bytearray, dice: random.Random) -> bytes:
    other = dice.choice(list(base_files().values()))
    return bytes(data[: dice.randrange(len(data))] + other[dice.randrange(len(other)) :])


MUTATIONS: tuple[Mutation, ...] = (truncated, flipped, lying, repeated, spliced)


def broken(case: int) -> tuple[str, bytes]:
    dice = random.Random(case)
    files = base_files(speech=dice.random() < 0.3)
    name, mutation = list(files)[case % len(files)], dice.choice(MUTATIONS)
    return f"case {case}: {name}, {mutation.__name__}", mutation(bytearray(files[name]), dice)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.audio.pool.MOST_ENDED", 10**6)  # all are one client's
        with in_process_server(audio_workers=N_WORKERS) as url:
            yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=ANSWER_S) as client:
        yield client


def upload(client: httpx.Client, content: bytes) -> httpx.Response:
    form = {"model": "whisper-1", "language": "en", "fallback": "false"}
    return client.post("/v1/audio/transcriptions", data=form, files={"file": ("upload", content)})


def audio_workers() -> set[int]:
    children = psutil.Process().children()
    return {child.pid for child in children if "router.audio.worker" in " ".join(child.cmdline())}


def runs_of_words(text: str, length: int = 4) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


class OtherCaller:
    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._file = wav_of(sentence_pcm("medium", 0))
        self.text = upload(client, self._file).json()["text"]
        self._runs = runs_of_words(self.text)
        assert self._runs

    def check(self) -> None:
        answer = upload(self._client, self._file)
        assert (answer.status_code, answer.json()["text"]) == (200, self.text)

    def is_heard_in(self, text: str) -> bool:
        return bool(self._runs & runs_of_words(text))


def send_broken(client: httpx.Client, cases: range) -> Counter[int]:
    other = OtherCaller(client)
    workers = audio_workers()
    assert 1 <= len(workers) <= N_WORKERS, "the others start when there is work for them"
    too_big: list[str] = []

    def send(case: int) -> int:
        if case % GOOD_EVERY == 0:
            other.check()
        what, content = broken(case)
        try:
            answer = upload(client, content)
        except httpx.HTTPError as error:
            pytest.fail(f"{what}: no answer: {error!r}")
        assert answer.status_code in (200, 400, 413), f"{what}: {answer.status_code} {answer.text}"
        if answer.status_code == 200:
            assert not other.is_heard_in(answer.json()["text"]), f"{what}: {answer.text}"
        else:
            error = ErrorResponse.model_validate_json(answer.content).error
            assert error.message, what
            if "of memory to decode" in error.message:
                too_big.append(what)
        return answer.status_code

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        statuses = Counter(pool.map(send, cases))
    other.check()
    wait_until(lambda: len(audio_workers()) == N_WORKERS, ANSWER_S, "as many workers as set")
    assert len(workers - audio_workers()) <= len(too_big), too_big
    return statuses


def test_each_base_file_is_heard(client: httpx.Client) -> None:
    said = set(sentences_of("short")[1].text.split())
    for name, content in base_files().items():
        heard = set(upload(client, content).json()["text"].split())
        assert len(said & heard) > len(said) / 2, name
    for name, content in base_files(speech=False).items():
        assert upload(client, content).json()["text"] == "", name


def test_300_broken_uploads_harm_nobody(client: httpx.Client, record_property: Record) -> None:
    statuses = send_broken(client, range(300))
    assert min(statuses[200], statuses[400]) > 50, statuses
    record_property("inputs", statuses.total())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(5))
def test_5000_broken_uploads_harm_nobody(
    client: httpx.Client, part: int, record_property: Record
) -> None:
    statuses = send_broken(client, range(1000 * (part + 1), 1000 * (part + 2)))
    assert min(statuses[200], statuses[400]) > 150, statuses
    record_property("inputs", statuses.total())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_bombs_in_every_container_harm_nobody(
    url: str, client: httpx.Client, record_property: Record
) -> None:
    """Each is answered within the server's bounds on time and memory, and another caller meanwhile.

    The longest is of 4 MB, which edits make four hours.
    """
    other = OtherCaller(client)
    n_bombs = 0
    with (
        httpx.Client(base_url=url, timeout=10 * ANSWER_S) as attacker,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        for what, content in bombs(base_files(speech=False), BOMB_BYTES):
            n_bombs += 1
            answering = pool.submit(upload, attacker, content)
            if n_bombs % GOOD_EVERY == 0:
                other.check()
            try:
                answer = answering.result()
            except httpx.HTTPError as error:
                pytest.fail(f"{what}: no answer: {error!r}")
            assert answer.status_code in (200, 400), f"{what}: {answer.status_code} {answer.text}"
            if answer.status_code == 400:
                assert ErrorResponse.model_validate_json(answer.content).error.message, what
    other.check()
    record_property("inputs", n_bombs)
