"""What sidecars say of the settings that texts depend on."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.archives.outputs import Archive
from cluster.archives.places import Place


def test_sidecars_tell_recordings_of_voices_apart_and_hold_none(tmp_path: Path) -> None:
    kept = []
    for content in ("UklGRg", "UklGRh"):
        voices = (f"data:audio/wav;base64,{content}",)
        where = Place.of(str(tmp_path))
        settings = Archive(where, fields={"known_speaker_references": voices}).settings
        assert content not in json.dumps(settings)
        kept.append(settings)
    assert kept[0] != kept[1]
