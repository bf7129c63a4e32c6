"""What the CPU comparison rests on: forced lengths, files of their own, waits."""

from __future__ import annotations

import time
from pathlib import Path

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
