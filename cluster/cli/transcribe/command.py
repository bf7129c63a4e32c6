"""The flags of `splitscribe transcribe`, which are openai/whisper's and a few more, as a `Job`.

Flags that say how to transcribe become the fields of the HTTP API and are checked by its rules,
in this process as for a server, so that both mean the same. All is refused before a model is
loaded. What the work needs is imported only when there is some: `--help` stays quick.
"""

from __future__ import annotations

from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cluster.cli.transcribe.flags import SWITCH, Switch, optional_int, optional_text
from cluster.errors import InvalidRequestError

if TYPE_CHECKING:
    from cluster.cli.transcribe.job import Form, Job, Place
    from router.api.params import TranscriptionParams
    from router.api.subtitles import CueOptions

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

FORMATS = ("txt", "vtt", "srt", "tsv", "json")
DEFAULT_JOBS = 4
INTERRUPTED = 130  # the shell's status after Ctrl-C
FALLBACK_STEP = "0.2"  # between the server's temperatures
RATIO, LOGPROB, NO_SPEECH = "2.4", "-1.0", "0.6"  # `QualityGates`' thresholds

SPEECH, PLACE, OUTPUT = "What is said", "Where the work is done", "What is written"
SEARCH, AGAIN, LONG = "How text is found", "When a window is tried again", "How long files are read"


class OutputFormat(StrEnum):
    txt = "txt"
    vtt = "vtt"
    srt = "srt"
    tsv = "tsv"
    json = "json"
    all = "all"


class TaskChoice(StrEnum):
    transcribe = "transcribe"
    into_english = "translate"  # `translate` is a method of str


class DecodingChoice(StrEnum):
    parallel = "parallel"
    sequential = "sequential"


def _flag(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def _switch(panel: str, text: str) -> Any:
    return _flag(panel, text, case_sensitive=False, metavar=SWITCH)


def _number(panel: str, text: str) -> Any:
    """A field of the API, which checks it; "None" is as if it had not been said."""
    return _flag(panel, text, metavar="NUMBER", parser=optional_text)


def _threshold(text: str) -> Any:
    """A field of the API, too; "None" turns it off."""
    return _flag(AGAIN, text, metavar="NUMBER|None")


def _limit(text: str) -> Any:
    return _flag(OUTPUT, text, metavar="INT", parser=optional_int)


def transcribe(
    files: Annotated[list[Path], typer.Argument(help="audio or video files", metavar="FILE")],
    model: Annotated[
        str, _flag(PLACE, "'demo', a folder, a Hub id, or a short name such as turbo")
    ] = "demo",
    language: Annotated[
        str | None, _flag(SPEECH, "code or English name; omitted: detected")
    ] = None,
    task: Annotated[TaskChoice, _flag(SPEECH, "translate: into English")] = TaskChoice.transcribe,
    initial_prompt: Annotated[
        str | None, _flag(SPEECH, "text that came before, in the style that you want")
    ] = None,
    hotwords: Annotated[
        str | None, _flag(SPEECH, "names and terms to expect, for every window")
    ] = None,
    output_dir: Annotated[
        Path, _flag(OUTPUT, "folder for the results", "--output-dir", "-o")
    ] = Path("."),
    output_format: Annotated[
        OutputFormat, _flag(OUTPUT, "one format, or all five", "--output-format", "-f")
    ] = OutputFormat.all,
    verbose: Annotated[Switch, _switch(OUTPUT, "print segments too")] = Switch.true,
    word_timestamps: Annotated[
        Switch, _switch(OUTPUT, "find when each word is spoken")
    ] = Switch.false,
    highlight_words: Annotated[
        Switch, _switch(OUTPUT, "underline each word as it is spoken (srt, vtt)")
    ] = Switch.false,
    max_line_width: Annotated[int | None, _limit("characters in a line of a subtitle")] = None,
    max_line_count: Annotated[
        int | None, _limit("lines in a subtitle, with --max-line-width")
    ] = None,
    max_words_per_line: Annotated[int | None, _limit("words in a subtitle")] = None,
    decoding: Annotated[
        DecodingChoice,
        _flag(
            LONG,
            "parallel: cut at pauses, windows side by side, fast; "
            "sequential: openai/whisper's way, each window after the last",
        ),
    ] = DecodingChoice.parallel,
    condition_on_previous_text: Annotated[
        Switch | None, _switch(LONG, "sequential: prompt a window with the text before it \\[True]")
    ] = None,
    carry_initial_prompt: Annotated[
        Switch | None, _switch(LONG, "sequential: give every window the prompt \\[False]")
    ] = None,
    clip_timestamps: Annotated[
        str | None,
        _flag(
            LONG,
            "sequential: read only start,end,start,end,... in seconds; "
            "a last start without end lasts to the file's end",
            metavar="S,S,...",
        ),
    ] = None,
    hallucination_silence_threshold: Annotated[
        str | None,
        _number(
            LONG,
            "sequential: skip silence longer than this many seconds around what may be made up",
        ),
    ] = None,
    temperature: Annotated[
        str, _number(SEARCH, "0 takes the likeliest token; up to 1, samples")
    ] = "0",
    beam_size: Annotated[
        str | None, _number(SEARCH, "beams at temperature 0 \\[1: greedy]")
    ] = None,
    patience: Annotated[
        str | None, _number(SEARCH, "with --beam-size: how long beams go on \\[1]")
    ] = None,
    best_of: Annotated[str | None, _number(SEARCH, "candidates above temperature 0 \\[1]")] = None,
    length_penalty: Annotated[
        str | None, _number(SEARCH, "rank candidates by Google's formula; omitted: by mean")
    ] = None,
    seed: Annotated[str | None, _number(SEARCH, "the same seed samples the same text")] = None,
    temperature_increment_on_fallback: Annotated[
        str, _threshold("from temperature 0, go up by this to 1; None: never try again")
    ] = FALLBACK_STEP,
    compression_ratio_threshold: Annotated[
        str, _threshold("above it, text repeats itself; None: off")
    ] = RATIO,
    logprob_threshold: Annotated[
        str, _threshold("below it, the model is unsure; None: off")
    ] = LOGPROB,
    no_speech_threshold: Annotated[
        str, _threshold("above it, what is unsure is silence; None: off")
    ] = NO_SPEECH,
    device: Annotated[str, _flag(PLACE, "auto, cpu or cuda")] = "auto",
    threads: Annotated[int, _flag(PLACE, "torch threads; 0: every core", min=0)] = 0,
    fp16: Annotated[
        Switch | None, _switch(PLACE, "False: compute in float32; else as the device likes")
    ] = None,
    jobs: Annotated[int, _flag(PLACE, "files in work at a time", min=1)] = DEFAULT_JOBS,
    server: Annotated[
        str | None, _flag(PLACE, "URL of a running server; omitted: in this process")
    ] = None,
    api_key: Annotated[str | None, _flag(PLACE, "the server's", envvar="OPENAI_API_KEY")] = None,
) -> None:
    """Transcribe files, in this process or through a running server.

    The flags are openai/whisper's, with dashes or underscores; "--word-timestamps" and
    "--word_timestamps True" are the same.

    splitscribe transcribe talk.mp3 -f srt

    splitscribe transcribe *.wav --model turbo --language de --word-timestamps -o texts

    splitscribe transcribe long.m4a --decoding sequential --beam-size 5 --best-of 5

    splitscribe transcribe talk.mp3 --server http://127.0.0.1:8000
    """
    from cluster.cli.transcribe.job import Job, Place
    from router.api.subtitles import CueOptions

    form = _form(
        {
            "language": language,
            "prompt": initial_prompt,
            "hotwords": hotwords,
            "seed": seed,
            "temperature": None if temperature == "0" else temperature,
            "fallback": _fallback(temperature_increment_on_fallback),
            "beam_size": beam_size,
            "patience": patience,
            "best_of": best_of,
            "length_penalty": length_penalty,
            "compression_ratio_threshold": _changed(compression_ratio_threshold, RATIO),
            "logprob_threshold": _changed(logprob_threshold, LOGPROB),
            "no_speech_threshold": _changed(no_speech_threshold, NO_SPEECH),
        }
    )
    following = _form(
        {
            "condition_on_previous_text": condition_on_previous_text,
            "carry_initial_prompt": carry_initial_prompt,
            "clip_timestamps": None if clip_timestamps == "0" else clip_timestamps,
            "hallucination_silence_threshold": hallucination_silence_threshold,
        }
    )
    if decoding is DecodingChoice.sequential:
        form |= {"decoding": "sequential"} | following
    else:
        _check_parallel(following)
    cues = CueOptions(max_line_width, max_line_count, bool(highlight_words), max_words_per_line)
    _check_words(cues, bool(word_timestamps))
    if word_timestamps:
        form["timestamp_granularities"] = ("segment", "word")
    _run(
        Job(
            files=tuple(files),
            form=form,
            params=_params(model, task, form),
            cues=cues,
            output_dir=output_dir,
            formats=FORMATS if output_format is OutputFormat.all else (output_format.value,),
            verbose=bool(verbose),
            jobs=jobs,
            place=_place(Place(server, api_key, device, threads, _dtype(fp16))),
        )
    )


def _run(job: Job) -> None:
    from cluster.cli.transcribe.run import transcribe_files

    try:
        transcribe_files(job, out, err)
    except KeyboardInterrupt:
        err.print("splitscribe: interrupted; what was written stays", style="red")
        raise typer.Exit(INTERRUPTED) from None


def _form(flags: dict[str, str | None]) -> Form:
    """Fields of the API for what was said."""
    return {name: str(value) for name, value in flags.items() if value is not None}


def _params(model: str, task: TaskChoice, form: Form) -> TranscriptionParams:
    """The request that a server would make of the form.

    Raises:
        InvalidRequestError: what the API refuses, is refused here.
    """
    from cluster.model.languages import LANGUAGES
    from router.api.forms import parse_transcription

    pairs = [("model", model), ("response_format", "verbose_json")]
    for name, content in form.items():
        texts = (content,) if isinstance(content, str) else content
        pairs += [(name, text) for text in texts]
    return replace(parse_transcription(pairs, LANGUAGES), task=task.value)


def _fallback(step: str) -> str | None:
    if step.lower() == "none":
        return "false"
    if step != FALLBACK_STEP:
        raise InvalidRequestError(
            f"--temperature-increment-on-fallback is {FALLBACK_STEP} or None here, not {step}"
        )
    return None


def _changed(text: str, usual: str) -> str | None:
    """The API's spelling: "off" for None, nothing for what is so anyway."""
    if text.lower() == "none":
        return "null"
    return None if text == usual else text


PARALLEL_WAYS = {  # what parallel mode does anyway may be said
    "condition_on_previous_text": "False",
    "carry_initial_prompt": "True",
}


def _check_parallel(following: Form) -> None:
    for name, value in following.items():
        if PARALLEL_WAYS.get(name) != value:
            raise InvalidRequestError(
                f"{_spelled(name)} is for windows that follow one another: "
                "add --decoding sequential"
            )


def _check_words(cues: CueOptions, has_words: bool) -> None:
    """Whether what is made of words, has them, and has an effect."""
    for item in fields(cues):
        if not has_words and getattr(cues, item.name) != item.default:
            raise InvalidRequestError(f"{_spelled(item.name)} needs --word-timestamps")
    if cues.max_line_count and not cues.max_line_width:
        raise InvalidRequestError("--max-line-count needs --max-line-width")
    if cues.max_words_per_line and cues.flows:
        raise InvalidRequestError(
            "--max-words-per-line does nothing where both --max-line-width and "
            "--max-line-count say how words flow: leave one of the three out"
        )


def _place(place: Place) -> Place:
    if place.server and (place.device, place.threads, place.dtype) != ("auto", 0, None):
        raise InvalidRequestError(
            "--device, --threads and --fp16 are for work in this process: "
            "where --server is, they are its own settings"
        )
    return place


def _dtype(fp16: Switch | None) -> str | None:
    return "float32" if fp16 is Switch.false else None


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
