"""What the CPU comparison rests on: forced lengths, ratios within a round, the arithmetic."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmark.cpu.report import Row, comparisons
from benchmark.rivals.engines import _by_file
from benchmark.shared.clips import UniqueFiles
from benchmark.shared.forced_length import forced_checkpoint
from tests.support.checkpoints import ModelShape

SMALL = ModelShape(64, 2, 2, 2, n_vocab=4_000, n_languages=4)


def test_a_checkpoint_is_made_again_for_another_length(tmp_path: Path) -> None:
    folder = forced_checkpoint(tmp_path / "c", SMALL, 5)
    before = (folder / "model.safetensors").read_bytes()
    forced_checkpoint(folder, SMALL, 5)
    assert (folder / "model.safetensors").read_bytes() == before
    forced_checkpoint(folder, SMALL, 6)
    assert (folder / "model.safetensors").read_bytes() != before


def test_our_best_is_compared_with_each_librarys_best_round_by_round() -> None:
    """The machine's drift, here a factor of 10 between rounds, is in no ratio."""
    rows = [
        Row("splitscribe float32", {1: [1.0, 1.0], 8: [1.0, 10.0]}),
        Row("splitscribe int8", {1: [0.5, 0.5], 8: [3.0, 30.0]}),
        Row("faster-whisper int8, 2 threads", {1: [2.0, 2.0], 8: [1.5, 15.0]}),
        Row("faster-whisper float32, 2 threads", {1: [1.0, 1.0], 8: [1.0, 10.0]}),
    ]
    found = {(one["in_flight"], one["theirs"]): one for one in comparisons("base", rows)}
    many = found[8, "faster-whisper int8, 2 threads"]
    assert (many["ours"], many["ratio"]) == ("splitscribe int8", 2.0)
    alone = found[1, "faster-whisper int8, 2 threads"]
    assert (alone["ours"], alone["ratio"]) == ("splitscribe float32", 0.5)


def test_a_trimmed_context_is_compared_beside_the_full_one() -> None:
    rows = [
        Row("splitscribe float32", {1: [1.0], 8: [2.0]}),
        Row("splitscribe float32 trimmed", {1: [3.0], 8: [9.0]}),
        Row("faster-whisper int8, 2 threads", {1: [1.0], 8: [1.5]}),
    ]
    found = {
        (one["in_flight"], one["ours"], one["theirs"]): one for one in comparisons("base", rows)
    }
    assert len(found) == 6
    trimmed, full, theirs = rows[1].system, rows[0].system, rows[2].system
    assert found[8, full, theirs]["ratio"] == pytest.approx(1.333)
    assert found[8, trimmed, theirs]["ratio"] == 6.0
    assert found[1, trimmed, full]["ratio"] == 3.0


def test_every_file_is_another_one(tmp_path: Path) -> None:
    audio = UniqueFiles(tmp_path, "short")
    files = [*audio.take(4), *audio.take(2)]
    assert len({file.read_bytes() for file in files}) == 6


def test_a_file_that_waits_for_the_engine_is_in_flight_all_the_while(tmp_path: Path) -> None:

    def one(file: Path) -> tuple[str, int]:
        time.sleep(0.02)
        return file.name, 1

    heard = _by_file(one, threads=1)([tmp_path / str(n) for n in range(8)], 4)
    assert [h.text for h in heard] == [str(n) for n in range(8)]
    assert heard[0].latency_s < heard[3].latency_s
    assert all(h.latency_s >= 4 * 0.02 for h in heard[3:])
