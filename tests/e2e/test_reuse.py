"""The same audio through a real cluster: encoded once, with the same text."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from benchmark.shared.clips import UniqueFiles
from tests.e2e.conftest import Server, wait_until
from tests.support.audio.recordings import lengthened

HEADER = "x-splitscribe-cache"


def ask(server: Server, audio: bytes, key: str = "none", **form: str) -> tuple[str, str]:
    answer = httpx.post(
        f"{server.url}/v1/audio/transcriptions",
        data={"model": "whisper-1", "response_format": "text", **form},
        files={"file": ("audio.wav", audio)},
        headers={"authorization": f"Bearer {key}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    return answer.text, answer.headers[HEADER]


def cached(server: Server, what: str) -> float:
    return sum(float(worker["extra"][what]) for worker in server.workers("encoder"))


def test_the_same_file_again_is_a_hit_with_the_same_text(server: Server) -> None:
    audio = lengthened("short", 1)
    first, said = ask(server, audio)
    assert said == "miss;hits=0;windows=1"
    assert cached(server, "cached_windows") >= 1
    for form in ({}, {"response_format": "vtt"}, {"prompt": "Something else."}):
        text, said = ask(server, audio, **form)
        assert said == "hit;hits=1;windows=1"
        if not form:
            assert text == first
    wait_until(server.is_idle, 30, "everything is free again")


def test_all_windows_of_a_long_file_are_found_in_either_mode(
    server: Server, tmp_path: Path
) -> None:
    """Sequential mode needs its first window twice, for the language and for the text."""
    audio = UniqueFiles(tmp_path, "long").take(1)[0].read_bytes()  # no other test sent its windows
    for decoding, found in (("parallel", "miss;hits=0"), ("sequential", "partial;hits=1")):
        first, said = ask(server, audio, decoding=decoding)
        assert said.startswith(found)
        again, said = ask(server, audio, decoding=decoding)
        assert said.startswith("hit")
        assert again == first


def test_the_same_audio_many_times_at_once_is_encoded_once_by_a_worker(server: Server) -> None:
    """The second worker encodes it too only if the first one seemed busy."""
    audio, before = lengthened("short", 5), cached(server, "cache_misses")
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: ask(server, audio), range(12)))
    assert len({text for text, _ in answers}) == 1
    hits = sum(int(found[1]) for _, said in answers if (found := re.search(r"hits=(\d+)", said)))
    misses = cached(server, "cache_misses") - before
    assert 1 <= misses <= 2
    assert hits == len(answers) - misses
    wait_until(server.is_idle, 30, "everything is free again")
