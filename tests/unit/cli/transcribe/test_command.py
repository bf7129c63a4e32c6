"""openai/whisper's command lines mean here what they mean there, or are refused."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import whisper

from cluster.cli.transcribe.flags import FALLBACK_STEP
from cluster.common.errors import SplitscribeError
from cluster.common.messages import QualityGates
from router.api.params import SequentialOptions, TranscriptionParams
from router.api.subtitles import CueOptions
from router.words import APPENDED, PREPENDED
from tests.unit.cli.transcribe.conftest import CommandLine, ParseJob

USUAL = TranscriptionParams("turbo", response_format="verbose_json")


def whispers_flags() -> set[str]:
    """Long flags that openai/whisper's own command line knows, read from its source."""
    calls = ast.walk(ast.parse((Path(whisper.__file__).parent / "transcribe.py").read_text()))
    return {
        call.args[0].value
        for call in calls
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "add_argument"
        and isinstance(call.args[0], ast.Constant)
        and str(call.args[0].value).startswith("--")
    }


def test_every_flag_of_whispers_is_known(command_line: CommandLine) -> None:
    flags = whispers_flags()
    assert len(flags) > 25
    for flag in flags:
        says = command_line(flag).output  # without its value, or without files: never done
        assert "No such option" not in says, flag


def test_without_flags_nothing_is_as_it_is_not_usually(job_of: ParseJob) -> None:
    job = job_of("a.wav")
    assert job.params == USUAL
    assert job.form == {}
    assert job.cues == CueOptions()
    assert job.formats == ("txt", "vtt", "srt", "tsv", "json")
    assert job.verbose


@pytest.mark.parametrize(
    "line",
    [
        "--temperature 0.0 --beam_size 1 --compression_ratio_threshold 2.4 "
        "--logprob_threshold -1.0 --no_speech_threshold 0.6",
        "--beam_size None --best_of None --max_line_width None --patience none",
        f"--suppress_tokens -1 --prepend_punctuations {PREPENDED} --append_punctuations {APPENDED}",
        "--condition_on_previous_text False --carry_initial_prompt True --clip_timestamps 0",
    ],
)
def test_what_is_so_anyway_may_be_said_and_is_not_sent(job_of: ParseJob, line: str) -> None:
    job = job_of("a.wav", *line.split())
    assert job.params == USUAL
    assert job.form == {}


def test_speakers_have_names(job_of: ParseJob, tmp_path: Path) -> None:
    job = job_of("a.wav", "--channels", "separate", "--channel-names", "Agent,Caller")
    assert (job.params.speakers.by, job.params.speakers.names) == ("channel", ("Agent", "Caller"))
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    files = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    known = ("--known-speaker-names", "Ann,Bob", "--known-speaker-references", files)
    speakers = job_of("a.wav", "--diarize", "True", *known).params.speakers
    assert (speakers.names, speakers.references) == (("Ann", "Bob"), (b"a", b"b"))


def test_a_command_line_of_whispers_is_understood_word_for_word(job_of: ParseJob) -> None:
    line = (
        "talk.mp3 --model turbo --language Japanese --task translate --device cpu --fp16 False "
        "--temperature 0 --beam_size 5 --best_of 5 --patience 1.5 --length_penalty 0.5 "
        "--temperature_increment_on_fallback 0.2 --compression_ratio_threshold 2.2 "
        "--logprob_threshold None --no_speech_threshold 0.5 --initial_prompt Hai "
        "--word_timestamps True --highlight_words True --max_line_width 42 --max_line_count 2 "
        "--verbose False --threads 2 --output_dir subs --output_format srt"
    )
    job = job_of(*line.split())
    assert job.params == replace(
        USUAL,
        model="turbo",
        language="ja",
        task="translate",
        prompt="Hai",
        beam_size=5,
        best_of=5,
        patience=1.5,
        length_penalty=0.5,
        words=True,
        gates=QualityGates(2.2, None, 0.5, keep="best"),
    )
    assert job.cues == CueOptions(42, 2, True)
    assert (job.target.device, job.target.threads, job.target.dtype) == ("cpu", 2, "float32")
    assert (job.output_dir, job.formats, job.verbose) == (Path("subs"), ("srt",), False)


def test_sequential_mode_has_whispers_options_and_keeps_the_last_attempt(job_of: ParseJob) -> None:
    line = (
        "a.wav --decoding sequential --condition_on_previous_text False --carry_initial_prompt "
        "--initial_prompt Hi --clip_timestamps 0,10,60 --hallucination_silence_threshold 2"
    )
    params = job_of(*line.split()).params
    assert params.sequential == SequentialOptions(False, True, 2.0, (0.0, 10.0, 60.0))
    assert params.gates == QualityGates(keep="last")


@pytest.mark.parametrize(
    "args",
    [
        ("--word_timestamps", "True"),
        ("--word-timestamps", "true"),
        ("--word_timestamps=True",),
        ("--word-timestamps",),
        ("--no-word-timestamps", "--word_timestamps"),
    ],
)
def test_a_switch_may_be_said_in_many_ways(job_of: ParseJob, args: tuple[str, ...]) -> None:
    assert job_of(*args, "a.wav").params.words
    assert job_of("a.wav", *args).params.words
    assert job_of(*args, "a.wav").files == ("a.wav",)
    for off in (("--word_timestamps", "False"), ("--no-word-timestamps",)):
        assert not job_of("a.wav", *off).params.words
    assert job_of("--", "--word_timestamps").files == ("--word_timestamps",)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--condition_on_previous_text True", "needs --decoding sequential"),
        ("--clip_timestamps 0,10", "needs --decoding sequential"),
        ("--hallucination_silence_threshold 2", "needs --decoding sequential"),
        ("--decoding sequential --clip_timestamps 10,5", "must not decrease"),
        ("--max_line_width 40", "--max-line-width needs --word-timestamps"),
        ("--word_timestamps --max_line_count 2", "needs --max-line-width"),
        ("--word_timestamps --max_line_width 0", "at least 1"),
        (
            "--word_timestamps --max_line_width 9 --max_line_count 2 --max_words_per_line 3",
            "leave one of the three out",
        ),
        ("--temperature_increment_on_fallback 0.1", "0.2 or None"),
        ("--beam_size 5 --temperature 0.5", "needs temperature 0"),
        ("--patience 2", "'beam_size'"),
        ("--language klingon", "klingon"),
        ("--suppress_tokens 3,4", "always -1"),
        ("--append_punctuations .", "--append-punctuations is always"),
        ("--server http://x --model_dir models", "have no effect with --server"),
        ("--server http://x --device cuda", "have no effect with --server"),
        ("--server http://x --fp16 False", "have no effect with --server"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    job_of: ParseJob, line: str, says: str
) -> None:
    with pytest.raises(SplitscribeError, match=says):
        job_of("a.wav", *line.split())


def test_help_has_its_flags_in_panels_with_their_defaults(command_line: CommandLine) -> None:
    says = " ".join(command_line("--help").output.split())
    assert all(panel in says for panel in ("Language and context", "Output", "Long files"))
    gates = QualityGates()
    for default in (gates.compression_ratio, gates.avg_logprob, gates.no_speech_prob):
        assert f"[default: {default:g}]" in says
    assert f"[default: {FALLBACK_STEP}]" in says
    assert "`" not in says
