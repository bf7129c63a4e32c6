"""Files of a job go through together, fail alone, and are written whole."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.cli.align import align
from cluster.cli.transcribe import command
from cluster.cli.transcribe.client import live_client
from cluster.cli.transcribe.command import FORMATS
from cluster.cli.transcribe.job import LiveJob, Target, TranscribeFile, Watcher
from cluster.cli.transcribe.local import local_settings
from cluster.cli.transcribe.run import ProgressBoard, Run, transcribe_files
from cluster.common.errors import (
    ConfigurationError,
    InvalidAudioError,
    InvalidRequestError,
    UnsupportedValueError,
)
from cluster.common.settings import RouterSettings
from cluster.demo.samples import sample_path, sample_text, words_of
from router.api.params import TranscriptionParams
from router.api.subtitles import CueOptions, srt, tsv, txt, vtt
from router.live.interface import LiveConfig
from router.transcript import Segment, Transcript, Word
from tests.support.router_fakes import make_transcript
from tests.unit.cli.transcribe.conftest import MakeJob


def make_files(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"sound")
    return [folder / name for name in names]


def hears_names(texts: int = 1) -> TranscribeFile:
    """A transcriber that hears a file's name, in several segments told one by one."""

    async def transcribe_one(file: Path, watcher: Watcher) -> Transcript:
        transcript = make_transcript(*[f" {file.stem} {i}." for i in range(texts)])
        for segment in transcript.segments:
            watcher.segments((segment,))
            watcher.progress(segment.end, transcript.duration_s)
            await asyncio.sleep(0)
        if file.stem == "noise":
            raise InvalidAudioError("no sound in it")
        if file.stem == "bug":
            raise RuntimeError("a mistake of ours")
        return transcript

    return transcribe_one


@pytest.mark.parametrize("bad", ["noise", "bug"])
async def test_a_failing_file_is_told_and_the_others_go_on(
    tmp_path: Path, make_job: MakeJob, paper: Console, bad: str
) -> None:
    files = make_files(tmp_path, "a.wav", f"{bad}.wav", "b.mp3")
    job = make_job(*files)
    job.output_dir.mkdir()
    assert await Run(job, paper, paper).run(dict.fromkeys(files), hears_names()) == 1
    assert sorted(file.name for file in job.output_dir.iterdir()) == ["a.txt", "b.txt"]
    told = paper.file.getvalue()  # type: ignore[attr-defined]
    assert f"{bad}.wav: " in told
    assert ("Traceback" in told) == (bad == "bug")


@pytest.mark.parametrize(("jobs", "at_once"), [(1, 1), (3, 3), (9, 5)])
async def test_as_many_files_are_in_work_as_was_said(
    tmp_path: Path, make_job: MakeJob, paper: Console, jobs: int, at_once: int
) -> None:
    files = make_files(tmp_path, *(f"{i}.wav" for i in range(5)))
    running = 0
    most = 0
    full = asyncio.Event()

    async def transcribe_one(file: Path, _: object) -> Transcript:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == at_once:
            full.set()
        await full.wait()
        running -= 1
        return make_transcript(f" {file.stem}")

    job = make_job(*files, jobs=jobs)
    job.output_dir.mkdir()
    async with asyncio.timeout(60):
        assert await Run(job, paper, paper).run(dict.fromkeys(files), transcribe_one) == 0
    assert most == at_once
    assert len(list(job.output_dir.iterdir())) == 5


@pytest.mark.parametrize("jobs", [1, 3])
async def test_segments_of_one_file_are_printed_together(
    tmp_path: Path, make_job: MakeJob, paper: Console, jobs: int
) -> None:
    files = make_files(tmp_path, "a.wav", "noise.wav", "b.wav", "c.wav")
    job = make_job(*files, jobs=jobs, verbose=True)
    job.output_dir.mkdir()
    err = Console(stderr=True, quiet=True)
    await Run(job, paper, err).run(dict.fromkeys(files), hears_names(3))
    lines = paper.file.getvalue().splitlines()  # type: ignore[attr-defined]
    printed = [line.split()[3] for line in lines if line.startswith("[")]
    order = list(dict.fromkeys(printed))
    assert [name for name in printed if name != "noise"] == [
        name for name in order if name != "noise" for _ in range(3)
    ]
    assert sorted(name for name in order if name != "noise") == ["a", "b", "c"]
    assert "[00:00.000 --> 00:01.500]  a 0." in lines


def test_progress_counts_the_seconds_that_containers_state_and_those_that_are_found() -> None:
    lengths = {Path("a.wav"): 10.0, Path("b.wav"): 20.0, Path("c.wav"): None}
    opened, failed, last = lengths
    board = ProgressBoard(lengths, Console(quiet=True))
    whole = board.bars.tasks[0]

    def told() -> tuple[str, str, list[str]]:
        in_work = [task.description for task in board.bars.tasks[1:] if task.visible]
        return whole.description, whole.fields["state"], in_work

    assert told() == ("0 of 3 files", "0/30 s", [])
    board.start(opened)
    board.advance(opened, 5.0, 10.0)
    assert told() == ("0 of 3 files", "5/30 s", ["a.wav"])
    board.advance(opened, 10.0, 10.0)
    board.end(opened)
    board.start(failed)
    board.end(failed)
    assert told() == ("2 of 3 files", "10/10 s", [])
    board.start(last)
    board.advance(last, 7.0, 7.0)
    assert told() == ("2 of 3 files", "17/17 s", ["c.wav"])


def test_files_that_cannot_be_read_are_told_before_a_model_is_loaded(
    tmp_path: Path, make_job: MakeJob, paper: Console
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("To do: nothing.")
    job = make_job(tmp_path / "none.wav", tmp_path / "none.wav", tmp_path / "no.wav", note)
    with pytest.raises(InvalidRequestError, match="3 of 3 files failed"):
        transcribe_files(job, paper, paper)
    told = paper.file.getvalue()  # type: ignore[attr-defined]
    assert "none.wav: No such file or directory\n" in told
    assert "no.wav: No such file or directory\n" in told
    assert "note.txt: Invalid file format" in told


def test_what_is_no_audio_is_not_aligned_with_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.serve.in_process.local_server", pytest.fail)
    note = tmp_path / "note.txt"
    note.write_text("To do: nothing.")
    with pytest.raises(InvalidRequestError, match=r"note\.txt: Invalid file format"):
        align(note, str(note), model="demo")
    with pytest.raises(InvalidRequestError, match=r"as a text: No such file or directory$"):
        align(note, "none.txt", model="demo")
    with pytest.raises(InvalidRequestError, match="--device has no effect"):
        align(note, str(note), server="http://127.0.0.1:9", device="cpu")


def test_a_text_is_aligned_by_a_model_that_is_downloaded_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def not_here(*_: object) -> None:
        raise ConfigurationError("not here")

    models: list[str] = []
    download = "cluster.cli.default_model.download"
    monkeypatch.setattr(download, lambda model, err: models.append(model))
    monkeypatch.setattr("cluster.cli.transcribe.local._check", lambda params: None)
    monkeypatch.setattr("cluster.serve.in_process.local_server", not_here)
    text = tmp_path / "text.txt"
    text.write_text("Victor gave that letter.")
    for model in ("turbo", "demo"):
        with pytest.raises(ConfigurationError, match="not here"):
            align(sample_path("short"), str(text), model=model)
    assert models == ["turbo", "demo"]
    assert capsys.readouterr().err.count("toy") == 1


@pytest.mark.parametrize("folder", ["a.wav/out", "/proc/self"])
def test_a_folder_that_cannot_be_made_or_written_into_is_told_before_the_work(
    tmp_path: Path, make_job: MakeJob, paper: Console, folder: str
) -> None:
    """Not even by root, whom no mode keeps out."""
    (file,) = make_files(tmp_path, "a.wav")
    with pytest.raises(InvalidRequestError, match=f"cannot write into .*{folder}"):
        transcribe_files(make_job(file, output_dir=tmp_path / folder), paper, paper)


# ---- The bundled model in this process: every format of one run tells the same.


def read_segments(file: Path) -> list[Segment]:
    segments = json.loads(file.read_text())["segments"]
    words = [tuple(Word(**word) for word in segment.pop("words")) for segment in segments]
    return [Segment(**segment, words=own) for segment, own in zip(segments, words, strict=True)]


def test_files_are_transcribed_together_and_every_format_tells_the_same(
    make_job: MakeJob, paper: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the environment is for other servers and clients."""
    for name, text in {
        "ALL_PROXY": "http://127.0.0.1:9",
        "OPENAI_CUSTOM_HEADERS": "Authorization: Bearer other",
        "SPLITSCRIBE_ROUTER__MAX_REQUESTS_PER_KEY": "1",
    }.items():
        monkeypatch.setenv(name, text)
    noise = tmp_path / "noise.wav"
    noise.write_bytes(b"RIFF" + bytes(1000))
    cues = CueOptions(max_line_width=20, max_line_count=1, highlight_words=True)
    params = TranscriptionParams("demo", response_format="verbose_json", words=True)
    files = (sample_path("short"), noise, sample_path("medium"))
    job = make_job(
        *files,
        form={"timestamp_granularities": ("segment", "word")},
        params=params,
        cues=cues,
        formats=FORMATS,
        target=Target(device="cpu"),
        verbose=True,
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
    heard = words_of(txt(read_segments(job.output_dir / "short.json")))
    assert len(set(heard) & set(words_of(sample_text("short")))) > len(heard) / 2
    assert len(list(job.output_dir.iterdir())) == 2 * len(FORMATS)


def test_a_persons_own_files_have_no_limits(make_job: MakeJob) -> None:
    job = make_job(target=Target(device="cpu", threads=1, dtype="float32"))
    settings, usual = local_settings(job.params.model, job.target, "key"), RouterSettings()
    assert settings.router.api_key == ("key",)
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
    monkeypatch.setattr("cluster.serve.in_process.local_server", pytest.fail)
    params = TranscriptionParams("demo", response_format="verbose_json", **asked)
    job = make_job(sample_path("short"), params=params, target=Target(device="cpu"))
    with pytest.raises(UnsupportedValueError, match=told):
        transcribe_files(job, paper, paper)
    assert not list(job.output_dir.iterdir())


async def test_a_live_session_is_refused_a_language_that_the_model_does_not_know() -> None:
    job = LiveJob(None, LiveConfig("demo", "de"), Target(device="cpu"))
    with pytest.raises(UnsupportedValueError, match="the language 'de'"):
        async with live_client(job):
            pass


@pytest.mark.parametrize("console", [command.out, command.err])
def test_what_is_printed_is_the_text_letter_for_letter(console: Console) -> None:
    text = "a ratio of 1:100:1 and a :key:"
    with console.capture() as printed:
        console.print(text, markup=False)
    assert printed.get() == f"{text}\n"
