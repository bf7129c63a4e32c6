"""The flags of `splitscribe batch`, which are checked as the API checks its fields."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.archives.inputs import list_items
from cluster.archives.outputs import FILES_AT_ONCE, FORMATS, Archive
from cluster.archives.places import Place
from cluster.cli.transcribe.command import INTERRUPTED, err, form_of, out, params_of
from cluster.cli.transcribe.flags import (
    FALLBACK_STEP,
    NUMBER_OF_ONE_OR_MORE,
    Flag,
    Switch,
    flag_parameters,
    whisper_command,
)
from cluster.cli.transcribe.job import ALIAS
from cluster.common.errors import InvalidRequestError
from cluster.common.extras import require_extra
from cluster.common.messages import Task

Format = StrEnum("Format", [*FORMATS])  # type: ignore[misc]  # typer needs an Enum for a list

OWN_FLAGS: dict[str, tuple[Flag, ...]] = {
    "Where it runs": (
        Flag(
            "address",
            str | None,
            "address of a Ray cluster, such as 10.0.0.1:6379; none: start one here; if left out: "
            "the cluster on this machine if an application runs there, otherwise one is started",
        ),
        Flag(
            "model",
            str | None,
            "a name that is served, or for a cluster that is started here a short name such as "
            "small, a Hub id, a folder, or 'demo', the bundled toy [default: what whisper-1 "
            "means there, or turbo]",
        ),
        Flag("config", Path | None, "YAML file with settings of a cluster that is started here"),
        Flag(
            "files_at_once",
            int,
            "number of files that are transcribed at the same time",
            FILES_AT_ONCE,
            NUMBER_OF_ONE_OR_MORE,
        ),
    ),
    "Selection": (
        Flag(
            "retry_failed",
            bool,
            "also try files again that failed because of themselves, such as damaged audio",
            False,
        ),
        Flag(
            "dry_run",
            bool,
            "only show how many hours of audio there are, and how long they take at the last "
            "run's speed",
            False,
        ),
    ),
    "Language and context": (Flag("task", Task, "translate: into English", "transcribe"),),
    "Output": (
        Flag("output", str | None, "folder, or URL of a prefix", short=("-o",)),
        Flag(
            "format",
            list[Format] | None,
            "json, srt, vtt or txt, repeatable [default: json]",
            short=("-f",),
        ),
        Flag("word_timestamps", bool, "find when each word is spoken", False),
    ),
}


INPUTS = typer.Argument(
    help="files, folders, globs, URLs (s3://, gs://, ...), manifests (.jsonl, .csv, .parquet), "
    "or - for a list from standard input",
    metavar="INPUT",
    show_default=False,
)


def _batch(**flags: Any) -> None:
    """Transcribe an archive: files, folders, buckets and manifests.

    It uses the application of the Ray cluster on this machine or at --address, whose other requests
    go first. Where none runs on this machine it starts one for this run. A second run transcribes
    only what is missing. The exit status is 0 if all files have their transcripts, and 3 if some
    failed.

    Example: splitscribe batch s3://talks/2026 -o s3://texts/2026 -f srt
    """
    require_extra("bulk", "fsspec", "pyarrow")
    flags = {k: bool(one) if isinstance(one, Switch) else one for k, one in flags.items()}
    if not flags["inputs"]:
        raise InvalidRequestError("name files, folders, URLs or manifests to transcribe")
    archive = archive_of(flags)
    try:
        items = list_items(flags["inputs"], sys.stdin)  # fails at once where a name does not exist
        from cluster.cli.batch.run import run_batch

        own = {name: flags[name] for name in ("model", "address", "config", "dry_run")}
        status = run_batch(items, archive, out, err, **own)
    except KeyboardInterrupt:
        err.print("splitscribe: interrupted; the same command goes on from here", style="red")
        status = INTERRUPTED
    raise typer.Exit(status)


_batch.__signature__ = Signature(  # type: ignore[attr-defined]
    (
        Parameter(
            "inputs",
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[list[str] | None, INPUTS],
        ),
        *flag_parameters(OWN_FLAGS),
    )
)
batch = whisper_command(_batch)


def archive_of(flags: Mapping[str, Any]) -> Archive:
    if not flags["output"]:
        raise InvalidRequestError("say where the transcripts go: --output FOLDER, or a URL")
    form = form_of({**flags, "temperature_increment_on_fallback": FALLBACK_STEP})
    model = flags["model"] or ALIAS
    params_of(model, flags["task"], form)
    return Archive(
        where=Place.of(flags["output"]),
        fields={"model": model, "response_format": "verbose_json", **form},  # it has the words
        task=flags["task"],
        formats=tuple(dict.fromkeys(str(one) for one in flags["format"] or ("json",))),
        retry_failed=flags["retry_failed"],
        files_at_once=flags["files_at_once"],
    )
