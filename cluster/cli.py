"""The command line: serve, transcribe, demo, check.

Settings come from flags over `SPLITSCRIBE_*` over `--config` over defaults. A mistake of the
user's is one line that says what to do; everything else keeps its traceback.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.errors import SplitscribeError
from cluster.settings import Settings, load_settings

app = typer.Typer(
    name="splitscribe",
    help="Disaggregated encoder/decoder serving for Whisper speech-to-text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


class DeviceChoice(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class DTypeChoice(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class TransportChoice(StrEnum):
    auto = "auto"
    nixl = "nixl"
    memory = "memory"


class LogLevel(StrEnum):
    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


class OutputFormat(StrEnum):
    txt = "txt"
    json = "json"
    all = "all"


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="'demo' (bundled, the default), a folder, or a Hub id", metavar="MODEL"
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings")] = None,
    host: Annotated[str | None, typer.Option(help="address to bind [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="port to bind [8000]; 0: a free one")] = None,
    encoders: Annotated[int | None, typer.Option(help="encoder workers [1]")] = None,
    decoders: Annotated[int | None, typer.Option(help="decoder workers [1]")] = None,
    device: Annotated[DeviceChoice | None, typer.Option(help="for both roles [auto]")] = None,
    dtype: Annotated[DTypeChoice | None, typer.Option(help="for both roles [auto]")] = None,
    transport: Annotated[TransportChoice | None, typer.Option(help="how KV moves [auto]")] = None,
    api_key: Annotated[str | None, typer.Option(help="bearer key that clients must send")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="name that clients may use; repeatable")
    ] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="[INFO]")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="join a running Ray cluster, such as 'auto'")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the merged settings and exit")
    ] = False,
) -> None:
    """Start the cluster in the foreground and answer OpenAI's clients.

    Example: splitscribe serve --port 9000 --encoders 2
    """
    both = {"device": device, "dtype": dtype}
    settings = load_settings(
        config,
        {
            "model": model,
            "transport": transport,
            "log_level": log_level,
            "served_model_names": tuple(served_model_name) if served_model_name else None,
            "router": {"host": host, "port": port, "api_key": api_key},
            "encoder": {"replicas": encoders, **both},
            "decoder": {"replicas": decoders, **both},
        },
    )
    if print_config:
        out.print(_as_yaml(settings), end="", markup=False)
        return
    from cluster.foreground import serve_foreground

    serve_foreground(settings, ray_address, err)


@app.command()
def transcribe(
    files: Annotated[list[Path], typer.Argument(help="audio files", metavar="FILE...")],
    model: Annotated[str, typer.Option(help="'demo', a folder, or a Hub id")] = "demo",
    language: Annotated[
        str | None, typer.Option(help="code or English name; omitted: detected")
    ] = None,
    initial_prompt: Annotated[
        str | None, typer.Option("--initial_prompt", "--initial-prompt", help="text of the context")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0.0, max=1.0)] = 0.0,
    output_dir: Annotated[
        Path, typer.Option("--output_dir", "--output-dir", "-o", help="folder for the results")
    ] = Path("."),
    output_format: Annotated[
        OutputFormat, typer.Option("--output_format", "--output-format", "-f")
    ] = OutputFormat.all,
    verbose: Annotated[bool, typer.Option(help="print segments as they come")] = True,
    device: Annotated[DeviceChoice, typer.Option()] = DeviceChoice.auto,
    threads: Annotated[int, typer.Option(help="torch threads; 0: every core", min=0)] = 0,
    server: Annotated[
        str | None, typer.Option(help="URL of a running server; omitted: in this process")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api_key", "--api-key", envvar="OPENAI_API_KEY")
    ] = None,
) -> None:
    """Transcribe files, in this process or through a running server.

    Flag names are openai/whisper's. Example: splitscribe transcribe talk.mp3 -f txt
    """
    from cluster.transcribe import Job, transcribe_files

    transcribe_files(
        Job(
            files=tuple(files),
            model=model,
            language=language,
            prompt=initial_prompt,
            temperature=temperature,
            output_dir=output_dir,
            formats=("txt", "json")
            if output_format is OutputFormat.all
            else (output_format.value,),
            verbose=verbose,
            device=device.value,
            threads=threads,
            server=server,
            api_key=api_key,
        ),
        out,
        err,
    )


@app.command()
def demo(
    encoders: Annotated[int, typer.Option(help="encoder workers", min=1)] = 1,
    decoders: Annotated[int, typer.Option(help="decoder workers", min=1)] = 1,
) -> None:
    """Start a cluster here, send it three bundled recordings, show what it heard, stop.

    Needs no download: the model and the recordings are part of the package.
    """
    from cluster.demo.showcase import run_demo

    run_demo(encoders, decoders, out, err)


@app.command()
def check() -> None:
    """Tell what this machine has, and which device and transport a cluster would use here."""
    from cluster.check import check_machine

    raise typer.Exit(check_machine(out))


def _as_yaml(settings: Settings) -> str:
    import yaml

    fields: dict[str, Any] = settings.model_dump(mode="json")
    for secret in (fields, fields["router"]):
        for name in ("cluster_key", "api_key"):
            if secret.get(name):
                secret[name] = "********"
    return yaml.safe_dump(fields, sort_keys=False)


def main() -> None:
    """Entry point: one line on stderr and status 1 for a user's mistake."""
    try:
        app()
    except SplitscribeError as error:
        err.print(f"splitscribe: {error.message}", style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
