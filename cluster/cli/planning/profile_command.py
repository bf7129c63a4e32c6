"""The command `splitscribe profile`: measures this machine's workers and writes a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.common.settings_sources import load_settings

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def profile(
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path(
        "profile.json"
    ),
    model: Annotated[str | None, typer.Option(help="'demo', a folder, or a Hub id [demo]")] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="YAML file with settings", show_default=False)
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="a running server, whose router and audio workers are measured too"),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="of that server")] = None,
    name: Annotated[str | None, typer.Option(help="of the profile [the file's]")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="of each, whose fastest counts")] = 15,
) -> None:
    """Measure what workers take on this machine, for splitscribe simulate.

    Times one encoder and one decoder in this process, on an otherwise idle machine: batches by size
    and context, decode steps by rows and context, prompts, and the hand-off of KV. With --url also
    the router and the audio workers of a server that runs there and has nothing else to do.

    Example: splitscribe profile -o mine.json && splitscribe simulate --profile mine.json
    """
    settings = load_settings(config_file, {"model": model})
    from cluster.planning.measure import Asked, measure
    from cluster.planning.profile import save_profile

    asked = Asked(name or output.stem, settings, url, api_key, rounds)
    found = measure(asked, lambda line: err.print(line, markup=False))
    save_profile(found, output)
    out.print(f"wrote {output}", markup=False)
