"""What the CPU comparison rests on: forced lengths, and files of their own."""

from __future__ import annotations

from pathlib import Path

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
