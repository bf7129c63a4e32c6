"""The flags of `splitscribe transcribe`, which are openai/whisper's and a few more, as a `Job`.

What cannot work together is refused here, before a model is loaded. What the work needs is
imported only when there is some: `--help` stays quick.
"""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cluster.errors import InvalidRequestError
from cluster.transcribe.flags import SWITCH, Switch, number

if TYPE_CHECKING:
    from cluster.transcribe.job import Job
    from router.schemas import SequentialOptions

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

FORMATS = ("txt", "vtt", "srt", "tsv", "json")
DEFAULT_JOBS = 4
INTERRUPTED = 130  # the shell's status after Ctrl-C
FALLBACK_STEP = 0.2  # between temperatures

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


def _number(panel: str, text: str, kind: Any, **bounds: float) -> Any:
    metavar = "INT" if kind is int else "FLOAT"
    return _flag(panel, text, parser=number(kind, **bounds), metavar=metavar)


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
    max_line_width: Annotated[
        int | None, _number(OUTPUT, "characters in a line of a subtitle", int, least=1)
    ] = None,
    max_line_count: Annotated[
        int | None, _number(OUTPUT, "lines in a subtitle, with --max-line-width", int, least=1)
    ] = None,
    max_words_per_line: Annotated[
        int | None, _number(OUTPUT, "words in a subtitle", int, least=1)
    ] = None,
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
        float | None,
        _number(
            LONG,
            "sequential: skip silence longer than this many seconds around what may be made up",
            float,
            least=0,
        ),
    ] = None,
    temperature: Annotated[
        float, _flag(SEARCH, "0 takes the likeliest token, above it samples", min=0, max=1)
    ] = 0.0,
    beam_size: Annotated[
        int | None, _number(SEARCH, "beams at temperature 0 \\[1: greedy]", int, least=1, most=16)
    ] = None,
    patience: Annotated[
        float | None, _number(SEARCH, "with --beam-size: how long beams go on \\[1]", float)
    ] = None,
    best_of: Annotated[
        int | None, _number(SEARCH, "candidates above temperature 0 \\[1]", int, least=1, most=16)
    ] = None,
    length_penalty: Annotated[
        float | None,
        _number(SEARCH, "rank beams by Google's formula; omitted: by mean", float, least=0, most=1),
    ] = None,
    seed: Annotated[
        int | None, _number(SEARCH, "the same seed samples the same text", int, least=0)
    ] = None,
    temperature_increment_on_fallback: Annotated[
        float | None,
        _number(AGAIN, "from temperature 0 on, go up by this; None: never try again", float),
    ] = FALLBACK_STEP,
    compression_ratio_threshold: Annotated[
        float | None, _number(AGAIN, "above it, text repeats itself; None: off", float)
    ] = 2.4,
    logprob_threshold: Annotated[
        float | None, _number(AGAIN, "below it, the model is unsure; None: off", float)
    ] = -1.0,
    no_speech_threshold: Annotated[
        float | None, _number(AGAIN, "above it, what is unsure is silence; None: off", float)
    ] = 0.6,
    device: Annotated[str, _flag(PLACE, "auto, cpu or cuda")] = "auto",
    threads: Annotated[int, _flag(PLACE, "torch threads; 0: every core", min=0)] = 0,
    fp16: Annotated[
        Switch | None, _switch(PLACE, "False: compute in float32; omitted: as the device likes")
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
    from cluster.messages import QualityGates
    from cluster.transcribe.job import Job, Place
    from router.schemas import TranscriptionParams
    from router.subtitles import CueOptions

    is_sequential = decoding is DecodingChoice.sequential
    sequential = {
        "condition_on_previous_text": _optional(condition_on_previous_text),
        "carry_initial_prompt": _optional(carry_initial_prompt),
        "clip_timestamps": _clips(clip_timestamps),
        "hallucination_silence_threshold": hallucination_silence_threshold,
    }
    params = TranscriptionParams(
        model=model,
        language=_language(language),
        prompt=initial_prompt or None,
        hotwords=hotwords or None,
        temperature=temperature,
        fallback=_falls_back(temperature_increment_on_fallback),
        seed=seed,
        response_format="verbose_json",
        task=task.value,
        words=bool(word_timestamps),
        decoding=decoding.value,
        sequential=_sequential(is_sequential, sequential),
        beam_size=beam_size or 1,
        patience=1.0 if patience is None else patience,
        best_of=best_of or 1,
        length_penalty=length_penalty,
        gates=QualityGates(
            compression_ratio_threshold,
            logprob_threshold,
            no_speech_threshold,
            keep="last" if is_sequential else "best",
        ),
    )
    _run(
        Job(
            files=tuple(files),
            params=params,
            cues=CueOptions(
                max_line_width, max_line_count, bool(highlight_words), max_words_per_line
            ),
            output_dir=output_dir,
            formats=FORMATS if output_format is OutputFormat.all else (output_format.value,),
            verbose=bool(verbose),
            jobs=jobs,
            place=Place(server, api_key, device, threads, _dtype(_optional(fp16))),
        )
    )


def _run(job: Job) -> None:
    """Check the job as a whole, and do it."""
    from cluster.transcribe.run import transcribe_files

    _check_words(job)
    _check_place(job)
    if job.params.patience != 1 and job.params.beam_size == 1:
        raise InvalidRequestError("--patience needs --beam-size")
    try:
        transcribe_files(job, out, err)
    except KeyboardInterrupt:
        err.print("splitscribe: interrupted; what was written stays", style="red")
        raise typer.Exit(INTERRUPTED) from None


def _check_words(job: Job) -> None:
    """Whether what needs words, has them."""
    from router.subtitles import CueOptions

    cues = job.cues
    if not job.params.words:
        for item in fields(cues):
            if getattr(cues, item.name) != getattr(CueOptions(), item.name):
                raise InvalidRequestError(f"{_spelled(item.name)} needs --word-timestamps")
    if cues.max_line_count and not cues.max_line_width:
        raise InvalidRequestError("--max-line-count needs --max-line-width")
    if cues.max_words_per_line and cues.flows:
        raise InvalidRequestError(
            "--max-words-per-line does nothing where both --max-line-width and "
            "--max-line-count say how words flow: leave one of the three out"
        )


def _check_place(job: Job) -> None:
    place = job.place
    if place.server and (place.device, place.threads, place.dtype) != ("auto", 0, None):
        raise InvalidRequestError(
            "--device, --threads and --fp16 are for work in this process: "
            "where --server is, they are its own settings"
        )


PARALLEL_WAYS = {  # what parallel mode does anyway, and may be said
    "condition_on_previous_text": False,
    "carry_initial_prompt": True,
    "clip_timestamps": (),
}


def _sequential(is_sequential: bool, given: dict[str, Any]) -> SequentialOptions:
    """Options of sequential mode, refused in the other one unless they change nothing there."""
    from router.schemas import SequentialOptions

    said = {name: value for name, value in given.items() if value is not None}
    if is_sequential:
        return SequentialOptions(**said)
    for name, value in said.items():
        if name not in PARALLEL_WAYS or PARALLEL_WAYS[name] != value:
            raise InvalidRequestError(
                f"{_spelled(name)} is for windows that follow one another: "
                "add --decoding sequential"
            )
    return SequentialOptions()


def _language(name: str | None) -> str | None:
    from cluster.model.languages import language_code

    code = language_code(name) if name else None
    if name and code is None:
        raise InvalidRequestError(f"{name!r} is no language that is known here")
    return code


def _falls_back(step: float | None) -> bool:
    if step not in (None, FALLBACK_STEP):
        raise InvalidRequestError(
            f"--temperature-increment-on-fallback is {FALLBACK_STEP} or None here, not {step:g}"
        )
    return step is not None


def _clips(text: str | None) -> tuple[float, ...] | None:
    """Seconds of "start,end,start,end,..."; "0", which is the whole file, is ()."""
    if text is None:
        return None
    try:
        times = tuple(float(part) for part in text.split(","))
        bounds = (0.0, *times, float("inf"))
        if not all(earlier <= later for earlier, later in pairwise(bounds)):
            raise ValueError(text)
    except ValueError:
        raise InvalidRequestError(
            f"--clip-timestamps takes rising seconds such as 0,10,60,75, not {text!r}"
        ) from None
    return () if times == (0.0,) else times


def _dtype(fp16: bool | None) -> str | None:
    return "float32" if fp16 is False else None


def _optional(value: Switch | None) -> bool | None:
    return None if value is None else bool(value)


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
