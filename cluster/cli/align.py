"""The command `splitscribe align`, which finds when the words of a known text are said."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.common.errors import InvalidRequestError
from cluster.common.settings import Device


def align(
    audio: Annotated[Path, typer.Argument(help="the recording", metavar="AUDIO")],
    text: Annotated[
        str, typer.Argument(help="a file with what is said, or '-' for stdin", metavar="TEXT")
    ],
    output_format: Annotated[
        Literal["json", "srt", "vtt"],
        typer.Option("-f", "--output-format", help="subtitles have a cue for each line of TEXT"),
    ] = "json",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write, if not the terminal")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="as in 'splitscribe transcribe'; a server uses its own")
    ] = None,
    language: Annotated[str | None, typer.Option(help="if left out, it is detected")] = None,
    device: Annotated[Device, typer.Option(help="where the model runs")] = "auto",
    server: Annotated[str | None, typer.Option(help="URL of a server that does the work")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="a key of that server", envvar="OPENAI_API_KEY")
    ] = None,
) -> None:
    """Find when each word of a known text is said.

    Words that are not said in the recording get no times. What is said and is not in the text is
    listed by itself.

    splitscribe align talk.mp3 talk.txt -f srt -o talk.srt
    """
    from rich.console import Console

    from cluster.cli.default_model import default_model, download, say_if_toy
    from cluster.cli.transcribe.client import align as align_by
    from cluster.cli.transcribe.job import ALIAS, Target
    from cluster.cli.transcribe.local import declared_s

    try:
        content = sys.stdin.read() if text == "-" else Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidRequestError(f"{text} cannot be read as a text: {why}") from error
    if server and device != "auto":
        raise InvalidRequestError("--device has no effect with --server, which has its own")
    if not audio.is_file():
        raise InvalidRequestError(f"there is no file {audio}")
    form = {"text": content, "response_format": output_format}
    if language is not None:
        form["language"] = language
    model = model or (ALIAS if server else default_model())
    if not server:
        try:
            declared_s(audio)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{audio}: {error.message}") from error
        err = Console(stderr=True, highlight=False, soft_wrap=True)
        download(model, err)
        say_if_toy({model}, err)
    target = Target(server, api_key, device=device)
    answer = asyncio.run(align_by(audio, model, form, target))
    if output is None:
        typer.echo(answer.decode().removesuffix("\n"))
        return
    try:
        output.write_bytes(answer)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {output}: {error.strerror}") from error
