"""The command `splitscribe pull`, which downloads models before they are needed."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.common.model.checkpoint import open_checkpoint


def pull(
    models: Annotated[
        list[str], typer.Argument(help="Hub ids, or short names such as turbo", metavar="MODEL...")
    ],
) -> None:
    """Download models into the cache of all commands, which then start without a network.

    A model that is there already is not downloaded again.

    Example: splitscribe pull turbo
    """
    for model in models:
        typer.echo(f"{model} is in {open_checkpoint(model).path}")
