"""What may be named on the command line: folders, patterns, URLs, standard input, raw samples."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from cluster.cli.transcribe import job as jobs
from cluster.cli.transcribe import run
from cluster.cli.transcribe.job import inputs_of
from cluster.cli.transcribe.run import check_names, transcribe_files
from cluster.common.errors import InvalidRequestError
from cluster.demo.samples import sample_path
from router.audio.containers import wav_head
from tests.support.http_host import Answer, Came, Host, http_host
from tests.unit.cli.transcribe.conftest import MakeJob
from tests.unit.cli.transcribe.test_run import hears_names, make_files

PCM = bytes(range(256)) * 20


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    content = io.BytesIO(PCM)
    monkeypatch.setattr(jobs.sys, "stdin", SimpleNamespace(buffer=content, isatty=lambda: False))
    return content


def names_of(*names: str | Path, raw: bool = False) -> list[str]:
    with inputs_of([str(name) for name in names], raw=raw) as found:
        return [one.path.name for one in found]


def test_a_folder_is_its_audio_files_by_name(tmp_path: Path) -> None:
    make_files(tmp_path, "b.WAV", "a.mp3", "notes.txt", "c.mkv", "deeper/d.wav")
    assert names_of(tmp_path) == ["a.mp3", "b.WAV", "c.mkv"]


def test_a_pattern_that_no_shell_has_read_is_what_it_matches(tmp_path: Path) -> None:
    make_files(tmp_path, "b.wav", "a.wav", "deeper/c.wav", "[x].wav")
    assert names_of(tmp_path / "?.wav") == ["a.wav", "b.wav"]
    assert names_of(tmp_path / "**" / "c.*") == ["c.wav"]
    assert names_of(tmp_path / "[x].wav") == ["[x].wav"], "a file of that very name"
    assert names_of(tmp_path / "b.wav", tmp_path / "?.wav") == ["b.wav", "a.wav"], "each once"


@pytest.mark.parametrize(("name", "message"), [("empty", "no audio file"), ("*.wav", "matches")])
def test_what_means_no_file_is_told_at_once(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequestError, match=message):
        names_of(tmp_path / name)


def test_standard_input_is_a_file_of_its_own(piped: io.BytesIO) -> None:
    with inputs_of(["-"], raw=False) as (one,):
        assert (one.shown, one.path.name) == ("stdin", "stdin")
        one.fetch()
        assert one.path.read_bytes() == PCM
    assert not one.path.exists()


def test_raw_samples_get_their_header_wherever_they_come_from(
    piped: io.BytesIO, tmp_path: Path
) -> None:
    (tmp_path / "a.pcm").write_bytes(PCM)
    with inputs_of(["-", str(tmp_path / "a.pcm")], raw=True) as found:
        for one in found:
            one.fetch()
            assert one.path.read_bytes() == wav_head() + PCM
    assert (tmp_path / "a.pcm").read_bytes() == PCM


@pytest.mark.parametrize(
    ("begin", "name"),
    [(b"fLaC", "flac"), (b"RIFF", "wav"), (b"ID3\4", "mp3"), (b"\0\0\0\x20ftypM4A ", "mp4")],
)
def test_what_has_a_header_is_not_taken_for_samples(
    tmp_path: Path, begin: bytes, name: str
) -> None:
    (tmp_path / "a").write_bytes(begin + PCM)
    refused = pytest.raises(InvalidRequestError, match=f"this is {name}, .* leave out --raw")
    with inputs_of([str(tmp_path / "a")], raw=True) as (one,), refused:
        one.fetch()


def test_nothing_is_waited_for_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(InvalidRequestError, match="pipe a file"):
        names_of("-")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://host/a/talk%20one.mp3?x=1#y", "talk one.mp3"),
        ("https://host/", "host"),
        ("https://host/..", "host"),
        ("https://host/a%2F..%2F..%2Fetc%2Fpasswd", "passwd"),
        ("https://host/..%5C..%5Cx.mp3", "x.mp3"),
    ],
)
def test_a_url_names_its_results_and_never_a_place(url: str, name: str) -> None:
    assert names_of(url) == [name]


def test_urls_are_fetched_and_a_failure_is_one_line(
    make_job: MakeJob, paper: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(came: Came, host: Host) -> Answer:
        is_there = came.path == "/talk.mp3"
        return Answer(body=sample_path("short").read_bytes()) if is_there else Answer(404)

    async def transcribe(job: run.Run, files: list[Path]) -> int:
        return await job.run(files, hears_names())

    monkeypatch.setattr(run, "_open_and_run", transcribe)
    with http_host(answer) as site:
        names = (f"{site.url}/talk.mp3", f"{site.url}/none.mp3", "http://127.0.0.1:1/x.mp3")
        job = make_job(*names, jobs=1)
        with pytest.raises(InvalidRequestError, match="2 of 3 files failed"):
            transcribe_files(job, paper, paper)
    assert (job.output_dir / "talk.txt").read_text() == "talk 0.\n"
    told = paper.file.getvalue()  # type: ignore[attr-defined]
    assert f"{site.url}/none.mp3: the server answers 404\n" in told
    assert "http://127.0.0.1:1/x.mp3: it cannot be fetched" in told


def test_results_that_would_overwrite_each_other_are_told_by_what_was_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"http://a/talk.mp3 and here/talk.wav"):
        check_names({Path("x/talk.mp3"): "http://a/talk.mp3", Path("talk.wav"): "here/talk.wav"})
