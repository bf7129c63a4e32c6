"""The command `splitscribe transcribe`: turn openai/whisper's flags and more into a `Job`.

Flags become fields of the HTTP API and are checked by its rules before a model is loaded.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from inspect import Signature
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from cluster.archives.outputs import pairs_of
from cluster.cli.transcribe.flags import (
    FALLBACK_STEP,
    FIXED,
    Switch,
    parameter_name,
    parameters,
    whisper_command,
)
from cluster.cli.transcribe.job import ALIAS, Form, Job, LiveJob, Target
from cluster.common.errors import InvalidRequestError
from cluster.common.messages import Task
from cluster.common.model.text.languages import LANGUAGES
from router.api.forms import parse_transcription
from router.api.kinds import AudioUrl, Kind, ListOf
from router.api.params import TranscriptionParams
from router.api.request_fields import FIELDS
from router.api.subtitles import CueOptions
from router.live.interface import LiveConfig

out = Console(highlight=False, emoji=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)

FORMATS = ("txt", "vtt", "srt", "tsv", "json")
INTERRUPTED = 130  # a shell's status after Ctrl-C
PARALLEL_WAYS = {  # flags of sequential mode that parallel mode accepts with this value
    "condition_on_previous_text": False,
    "carry_initial_prompt": True,
    "hallucination_silence_threshold": None,
}
LIVE_FLAGS = {
    *("files", "live", "raw"),
    *("model", "model_dir", "device", "threads", "fp16", "server", "api_key"),
    *("language", "initial_prompt", "hotwords"),
}
AUTO = ("auto", 0, None)  # the defaults of device, threads and dtype
WHOLE_FILE = {"clip_timestamps": "0"}  # openai/whisper's default


def _transcribe(**flags: Any) -> None:
    """Transcribe files, in this process or through a running server.

    The flags are openai/whisper's, with dashes or underscores; "--word-timestamps" and
    "--word_timestamps True" are the same.

    \b
    splitscribe transcribe talk.mp3 -f srt
    splitscribe transcribe *.wav --model large-v3 --language de -o texts
    splitscribe transcribe long.m4a --decoding sequential --beam-size 5
    splitscribe transcribe recordings/ https://example.org/talk.mp3
    ffmpeg -i a.mp4 -f s16le -ac 1 -ar 16000 - | splitscribe transcribe --raw -
    splitscribe transcribe talk.mp3 --server http://127.0.0.1:8000
    splitscribe transcribe --live --language en
    """
    said: dict[str, Any] = {
        name: bool(value) if isinstance(value, Switch) else value for name, value in flags.items()
    }
    if said["model_dir"]:  # the Hub's client reads it on import, which is later
        os.environ["HF_HUB_CACHE"] = str(said["model_dir"].expanduser())
    try:
        if said["live"]:
            from cluster.cli.transcribe.live import transcribe_live

            transcribe_live(live_job_of(said), out, err)
        else:
            from cluster.cli.transcribe.run import transcribe_files

            transcribe_files(job_of(said), out, err)
    except KeyboardInterrupt:
        err.print("splitscribe: interrupted; what was written stays", style="red")
        raise typer.Exit(INTERRUPTED) from None


_transcribe.__signature__ = Signature(tuple(parameters()))  # type: ignore[attr-defined]
transcribe = whisper_command(_transcribe)


def job_of(flags: Mapping[str, Any]) -> Job:
    """Raises InvalidRequestError: the API refuses a value, or a flag would have no effect."""
    if not flags["files"]:
        raise InvalidRequestError("name the files to transcribe, or use --live for the microphone")
    for name, value in FIXED.items():
        if flags[name] != value:
            raise InvalidRequestError(f"--{name.replace('_', '-')} is always {value} here")
    form = form_of(flags)
    output_format = flags["output_format"]
    return Job(
        files=tuple(flags["files"]),
        form=form,
        params=params_of(_model(flags), flags["task"], form),
        cues=_cues(flags),
        output_dir=flags["output_dir"],
        formats=FORMATS if output_format == "all" else (output_format,),
        verbose=flags["verbose"],
        jobs=flags["jobs"],
        target=_target(flags),
        raw=flags["raw"],
    )


def live_job_of(flags: Mapping[str, Any]) -> LiveJob:
    """Raises InvalidRequestError: as `job_of`, or a flag has no effect on live sessions."""
    for parameter in parameters():
        usual = parameter.default
        usual = bool(usual) if isinstance(usual, Switch) else usual
        if parameter.name not in LIVE_FLAGS and flags[parameter.name] != usual:
            raise InvalidRequestError(
                f"--{parameter.name.replace('_', '-')} has no effect with --live"
            )
    files = flags["files"] or ()
    if len(files) > 1:
        raise InvalidRequestError(f"--live takes one source, got {len(files)} files")
    if flags["raw"] and not files:
        raise InvalidRequestError("--raw is for a file or '-', not for the microphone")
    params = params_of(_model(flags), flags["task"], form_of(flags))
    words = (word.strip() for word in (params.hotwords or "").split(","))
    config = LiveConfig(
        model=params.model,
        language=params.language,
        prompt=params.prompt or "",
        keywords=tuple(word for word in words if word),
    )
    return LiveJob(files[0] if files else None, config, _target(flags), flags["raw"])


def form_of(flags: Mapping[str, Any]) -> Form:
    form: Form = {}
    for field in FIELDS.values():
        said = flags[parameter_name(field)] if field.flag else None
        if said is None or WHOLE_FILE.get(field.name) == said:
            continue
        text = str(said)
        texts = _listed(field.kind, text)
        value = field.kind.parse(field.name, list(texts) if field.kind.shape == "list" else text)
        if field.only_sequential and flags["decoding"] != "sequential":
            if field.name not in PARALLEL_WAYS or PARALLEL_WAYS[field.name] != value:
                raise InvalidRequestError(f"{field.flag} needs --decoding sequential")
        elif value != field.default:
            given = texts if isinstance(field.kind, ListOf) else text
            form[field.name] = "null" if value is None else given
    step = flags["temperature_increment_on_fallback"]
    if step.lower() == "none":
        form["fallback"] = "false"
    elif step != FALLBACK_STEP:
        raise InvalidRequestError(
            f"--temperature-increment-on-fallback is {FALLBACK_STEP} or None here, not {step}"
        )
    if flags["word_timestamps"]:
        form["timestamp_granularities"] = ("segment", "word")
    return form


def _listed(kind: Kind, text: str) -> tuple[str, ...]:
    if not isinstance(kind, ListOf):
        return (text,)
    items = tuple(text.split(","))
    if not isinstance(kind.item, AudioUrl):
        return items
    try:
        contents = [base64.b64encode(Path(item).read_bytes()).decode() for item in items]
    except OSError as error:
        raise InvalidRequestError(f"a known speaker's recording cannot be read: {error}") from error
    return tuple(f"data:application/octet-stream;base64,{content}" for content in contents)


def params_of(model: str, task: Task, form: Form) -> TranscriptionParams:
    pairs = pairs_of({**form, "model": model, "response_format": "verbose_json"})
    return replace(parse_transcription(pairs, LANGUAGES), task=task)


def _model(flags: Mapping[str, Any]) -> str:
    if flags["model"]:
        return str(flags["model"])
    if flags["server"]:
        return ALIAS
    from cluster.cli.default_model import default_model

    return default_model()


def _cues(flags: Mapping[str, Any]) -> CueOptions:
    cues = CueOptions(**{item.name: flags[item.name] for item in fields(CueOptions)})
    for item in fields(cues):
        if not flags["word_timestamps"] and getattr(cues, item.name) != item.default:
            raise InvalidRequestError(f"--{item.name.replace('_', '-')} needs --word-timestamps")
    if cues.max_line_count and not cues.max_line_width:
        raise InvalidRequestError("--max-line-count needs --max-line-width")
    if cues.max_words_per_line and cues.flows:
        raise InvalidRequestError(
            "--max-words-per-line does nothing where both --max-line-width and "
            "--max-line-count say how words flow: leave one of the three out"
        )
    return cues


def _target(flags: Mapping[str, Any]) -> Target:
    dtype = "float32" if flags["fp16"] is False else None
    target = Target(
        **{name: flags[name] for name in ("server", "api_key", "device", "threads")},
        dtype=dtype,
    )
    if target.server and (flags["model_dir"] or (target.device, target.threads, dtype) != AUTO):
        raise InvalidRequestError(
            "--model-dir, --device, --threads and --fp16 have no effect with --server, which has "
            "its own"
        )
    return target
