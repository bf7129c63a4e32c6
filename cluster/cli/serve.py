"""The command `splitscribe serve`, which runs a cluster in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.common.settings import Device, DType, LogLevel, PlacementName, Settings, Transport
from cluster.common.settings_sources import SECRETS, load_settings

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="a short name such as turbo, a Hub id, a folder, or 'demo', the bundled toy, "
            "which is the default",
            metavar="MODEL",
        ),
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="YAML file with settings")
    ] = None,
    host: Annotated[str | None, typer.Option(help="address to bind [127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(help="port to bind [8000]; 0 takes a free one")
    ] = None,
    encoders: Annotated[int | None, typer.Option(help="number of encoder workers [1]")] = None,
    decoders: Annotated[int | None, typer.Option(help="number of decoder workers [1]")] = None,
    device: Annotated[
        Device | None, typer.Option(help="device of encoder and decoder workers [auto]")
    ] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="number type of encoder and decoder workers [auto]")
    ] = None,
    placement: Annotated[
        PlacementName | None,
        typer.Option(help="encoder and decoder in one process (colocated) or apart (split) [auto]"),
    ] = None,
    transport: Annotated[
        Transport | None, typer.Option(help="how KV moves from encoders to decoders [auto]")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="bearer key that clients must send; repeatable")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="name that clients may use; repeatable")
    ] = None,
    log_level: Annotated[
        LogLevel | None, typer.Option(help="lowest level of log lines that are shown [INFO]")
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="show all lines of the start, as --log-level does"),
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the merged settings and exit")
    ] = False,
) -> None:
    """Start the cluster in the foreground and answer OpenAI's clients.

    Ctrl-C or SIGTERM stops it at any time, also during the start, within 90 s. The exit status
    is then 0; it is 1 after an error, or if stopping took longer.

    Example: splitscribe serve --port 9000 --encoders 2
    """
    both = {"device": device, "dtype": dtype}
    settings = load_settings(
        config_file,
        {
            "model": model,
            "placement": placement,
            "transport": transport,
            "log_level": log_level,
            "served_model_names": tuple(served_model_name) if served_model_name else None,
            "router": {"host": host, "port": port, "api_key": tuple(api_key or ()) or None},
            "encoder": {"replicas": encoders, **both},
            "decoder": {"replicas": decoders, **both},
        },
    )
    if print_config:
        out.print(as_yaml(settings), end="", markup=False)
        return
    from cluster.cli.foreground import StopSignals, serve_foreground

    with StopSignals(encoding=settings.log_format) as stop:
        stop.leave = _do_nothing  # nothing was started yet, so a signal may end the process
        is_verbose = verbose or log_level is not None
        serve_foreground(settings, err, stop, verbose=is_verbose)


def _do_nothing() -> None:
    pass


def as_yaml(settings: Settings) -> str:
    import yaml

    fields: dict[str, Any] = settings.model_dump(mode="json")
    if settings.models:
        for name in ("model", "served_model_names"):
            del fields[name]
        fields["models"] = {
            name: one.model_dump(mode="json", exclude_unset=True)
            for name, one in settings.models.items()
        }
    for secret in (fields, fields["router"], fields["batches"]):
        for name in SECRETS:
            if secret.get(name):
                secret[name] = "********"
    return yaml.safe_dump(fields, sort_keys=False)
