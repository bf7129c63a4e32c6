"""Pools of workers that live as long as one run over an archive, or one pipeline.

from cluster.archives.own_pools import own_pools
from cluster.archives.transcriber import Transcriber, map_options

with own_pools("openai/whisper-small"):
    talks = ray.data.read_parquet("/data/talks")
    talks.map_batches(Transcriber, **map_options()).write_parquet("/data/texts")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings


@contextmanager
def own_pools(
    model: str | None = None, *, config: Path | None = None, address: str | None = None
) -> Iterator[None]:
    """Start pools, and a Ray cluster for them, which this process is in until the block is left.

    The process is in an empty folder meanwhile, since Ray imports from the one that it is in: name
    files by absolute paths.

    Args:
        model: a folder, or a Hub id; None: that of `config`, or the bundled one. config: a YAML
            file with further settings.
        address: of a Ray cluster to start them in; None: one of their own on this machine.

    Raises:
        ConfigurationError: they do not start.
    """
    from cluster.serve.start.launch import running_cluster

    with running_cluster(own_settings(model, config), address=address):
        yield


def own_settings(model: str | None, config: Path | None) -> Settings:
    """Settings of pools for one run alone: nobody but the run is to find their HTTP."""
    return load_settings(config, {"model": model, "router": {"port": 0}})
