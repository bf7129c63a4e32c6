"""Files of a job go through together, fail alone, and are written whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from cluster.cli.transcribe.job import TranscribeFile, Watcher
from cluster.cli.transcribe.run import (
    Run,
    transcribe_files,
    write_results,
)
from cluster.common.errors import InvalidAudioError, InvalidRequestError
from router.api.formats import whisper_json
from router.api.subtitles import CueOptions, srt, tsv, txt, vtt
from router.transcript import Transcript
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
    assert await Run(job, paper, paper).run(files, hears_names()) == 1
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

    async def transcribe_one(file: Path, watcher: Watcher) -> Transcript:
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
        assert await Run(job, paper, paper).run(files, transcribe_one) == 0
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
    await Run(job, paper, err).run(files, hears_names(3))
    lines = paper.file.getvalue().splitlines()  # type: ignore[attr-defined]
    printed = [line.split()[3] for line in lines if line.startswith("[")]
    order = list(dict.fromkeys(printed))
    assert [name for name in printed if name != "noise"] == [
        name for name in order if name != "noise" for _ in range(3)
    ]
    assert sorted(name for name in order if name != "noise") == ["a", "b", "c"]
    assert "[00:00.000 --> 00:01.500]  a 0." in lines


def test_files_that_cannot_be_read_are_told_before_a_model_is_loaded(
    tmp_path: Path, make_job: MakeJob, paper: Console
) -> None:
    job = make_job(tmp_path / "none.wav", tmp_path / "none.wav", tmp_path / "no.wav")
    with pytest.raises(InvalidRequestError, match="2 of 2 files failed"):
        transcribe_files(job, paper, paper)
    told = paper.file.getvalue()  # type: ignore[attr-defined]
    assert "none.wav: No such file or directory\n" in told
    assert "no.wav: No such file or directory\n" in told


def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, make_job: MakeJob, paper: Console
) -> None:
    (file,) = make_files(tmp_path, "a.wav")
    with pytest.raises(InvalidRequestError, match="cannot write into"):
        transcribe_files(make_job(file, output_dir=file / "out"), paper, paper)


def test_a_folder_that_cannot_be_written_into_is_told_before_the_work(
    tmp_path: Path, make_job: MakeJob, paper: Console
) -> None:
    """Not even by root, whom no mode keeps out."""
    (file,) = make_files(tmp_path, "a.wav")
    with pytest.raises(InvalidRequestError, match="cannot write into /proc/self"):
        transcribe_files(make_job(file, output_dir=Path("/proc/self")), paper, paper)


@pytest.mark.parametrize("options", [CueOptions(), CueOptions(9, 2, True)])
def test_every_format_is_what_the_writers_write(tmp_path: Path, options: CueOptions) -> None:
    transcript = make_transcript(" Grüß Gott, 你好.", " General.")
    names = ("txt", "vtt", "srt", "tsv", "json")
    write_results(transcript, Path("x/my.talk.mp3"), tmp_path, names, options)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(f"my.talk.{n}" for n in names)
    written = {name: (tmp_path / f"my.talk.{name}").read_text("utf-8") for name in names}
    assert written.pop("json") == whisper_json(transcript)
    segments = transcript.segments
    assert written == {
        "txt": txt(segments),
        "tsv": tsv(segments),
        "srt": srt(segments, options),
        "vtt": vtt(segments, options),
    }
