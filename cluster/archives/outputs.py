"""The files beside an archive's data set: one per input and format, as the file endpoint answers.

Each is called as its input is below the folder that was named, with the format in place of the
suffix. Where two inputs differ by their suffix alone, it stays: `talk.wav.srt`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from cluster.archives.archive import FORMATS
from cluster.archives.inputs import Item
from cluster.archives.ledger import DATASET, OWN, Done
from cluster.archives.places import Place
from cluster.archives.rows import Row, transcript_of
from router.api.formats import render

MOST_BYTES = 240  # of a file's name, of which file systems take 255


def output_names(items: Iterable[Item], done: Mapping[str, Done]) -> dict[str, str]:
    """By key, what the outputs of each item are called before the format; what had one keeps it."""
    taken = {one.output for one in done.values()}
    names = {}
    for item in items:
        if item.key in done:
            names[item.key] = done[item.key].output
            continue
        stem, dot, _ = item.relative.rpartition(".")
        stem = _short(stem if dot and not stem.endswith("/") and stem else item.relative)
        if stem.split("/")[0] in (DATASET, OWN) or stem in taken:
            stem = _short(item.relative)
        number, name = 1, stem
        while name in taken:
            number += 1
            name = f"{stem}-{number}"
        taken.add(name)
        names[item.key] = name
    return names


def _short(relative: str) -> str:
    """With a last name that stays one with a number and a format behind it."""
    folder, slash, name = relative.rpartition("/")
    return folder + slash + name.encode()[:MOST_BYTES].decode(errors="ignore")


def write_outputs(row: Row, where: Place, formats: Collection[str], *, words: bool) -> None:
    """Write every format of a row that did not fail. Raises OSError.

    words: list them in the json.
    """
    if not formats or row["error"] is not None:
        return
    transcript = transcript_of(row)
    for name in formats:
        answer = render(transcript, FORMATS[name], words=words, segments=True)
        (where / f"{row['output']}.{name}").write_whole(answer.body)


def missing_outputs(
    done: Mapping[str, Done], keys: Iterable[str], where: Place, formats: Sequence[str]
) -> set[str]:
    """Keys of transcribed files one of whose outputs is not there."""
    if not formats:
        return set()
    there = {one.path for one in where.below(recursive=True)}
    return {
        key
        for key in keys
        if done[key].error is None
        and any(f"{where.path}/{done[key].output}.{name}" not in there for name in formats)
    }
