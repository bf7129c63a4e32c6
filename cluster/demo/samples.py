"""The recordings that ship with the package, and their texts."""

from __future__ import annotations

from pathlib import Path

SAMPLES = ("short", "medium", "long")  # about 5, 25 and 70 seconds

_FOLDER = Path(__file__).resolve().parent / "samples"


def sample_path(name: str) -> Path:
    return _FOLDER / f"{name}.flac"


def sample_text(name: str) -> str:
    return (_FOLDER / f"{name}.txt").read_text().strip()


def words_of(text: str) -> list[str]:
    return "".join(c if c.isalnum() or c == "'" else " " for c in text.lower()).split()
