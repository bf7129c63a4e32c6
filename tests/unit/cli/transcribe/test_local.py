"""The bundled model in this process: every format of one run tells the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.cli.transcribe.job import LiveJob, Source, Target
from cluster.cli.transcribe.local import live_in_process, local_settings
from cluster.cli.transcribe.run import transcribe_files
from cluster.common.errors import InvalidRequestError, UnsupportedValueError
from cluster.common.settings import RouterSettings
from cluster.demo.samples import sample_path, sample_text
from router.api.params import TranscriptionParams
from router.api.subtitles import CueOptions, srt, tsv, txt, vtt
from router.transcript import Segment, Word
from tests.unit.cli.transcribe.conftest import MakeJob

FORMATS = ("txt", "vtt", "srt", "tsv", "json")


def read_segments(file: Path) -> list[Segment]:
    """Segments as the json file has them."""

    def segment(fields: dict[str, Any]) -> Segment:
        words = tuple(Word(**word) for word in fields.pop("words", ()))
        return Segment(**fields | {"tokens": tuple(fields["tokens"])}, words=words)

    return [segment(fields) for fields in json.loads(file.read_text())["segments"]]


def letters(text: str) -> str:
    return re.sub(r"\W+", " ", text).lower().strip()


def test_files_are_transcribed_together_and_every_format_tells_the_same(
    make_job: MakeJob, paper: Console, tmp_path: Path
) -> None:
    noise = tmp_path / "noise.wav"
    noise.write_bytes(b"RIFF" + bytes(1000))
    cues = CueOptions(max_line_width=20, max_line_count=1, highlight_words=True)
    params = TranscriptionParams("demo", response_format="verbose_json", words=True)
    files = (sample_path("short"), noise, sample_path("medium"))
    job = make_job(
        *files, params=params, cues=cues, formats=FORMATS, target=Target(device="cpu"), verbose=True
    )
    with pytest.raises(InvalidRequestError, match="1 of 3 files failed"):
        transcribe_files(job, paper, paper)
    printed = paper.file.getvalue()  # type: ignore[attr-defined]
    assert f"{noise}: " in printed
    for name in ("short", "medium"):
        out = job.output_dir / name
        segments = read_segments(out.with_suffix(".json"))
        assert all(segment.words for segment in segments)
        assert out.with_suffix(".txt").read_text() == txt(segments)
        assert out.with_suffix(".tsv").read_text() == tsv(segments)
        assert out.with_suffix(".srt").read_text() == srt(segments, cues)
        assert out.with_suffix(".vtt").read_text() == vtt(segments, cues)
        for segment in segments:
            assert f"{segment.text}\n" in printed
    heard = letters(txt(read_segments(job.output_dir / "short.json"))).split()
    assert len(set(heard) & set(letters(sample_text("short")).split())) > len(heard) / 2
    assert len(list(job.output_dir.iterdir())) == 2 * len(FORMATS)


def test_a_persons_own_files_have_no_limits(make_job: MakeJob) -> None:
    job = make_job(target=Target(device="cpu", threads=1, dtype="float32"))
    settings, usual = local_settings(job.params.model, job.target), RouterSettings()
    assert settings.router.max_upload_bytes > 100 * usual.max_upload_bytes
    assert settings.router.max_audio_s > 24 * 3600
    assert settings.encoder.threads == settings.decoder.threads == 1
    assert settings.encoder.dtype == settings.decoder.dtype == "float32"


@pytest.mark.parametrize(
    ("asked", "told"),
    [({"language": "de"}, "the language 'de'"), ({"task": "translate"}, "cannot translate")],
)
def test_what_the_model_does_not_know_is_refused(
    make_job: MakeJob,
    paper: Console,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    told: str,
) -> None:
    """Before anything of the model is loaded."""
    monkeypatch.setattr("cluster.serve.in_process.local_transcriber", pytest.fail)
    params = TranscriptionParams("demo", response_format="verbose_json", **asked)
    job = make_job(sample_path("short"), params=params, target=Target(device="cpu"))
    with pytest.raises(UnsupportedValueError, match=told):
        transcribe_files(job, paper, paper)
    assert not list(job.output_dir.iterdir())


async def test_a_live_session_is_refused_a_language_that_the_model_does_not_know() -> None:
    job = LiveJob(Source(), "demo", "de", "", (), Target(device="cpu"))
    with pytest.raises(UnsupportedValueError, match="the language 'de'"):
        async with live_in_process(job):
            pass
