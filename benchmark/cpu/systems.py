"""Our server as `benchmark.cpu` runs it, and what all engines that it compares have in common."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from benchmark.rivals.engines import Heard
from benchmark.shared.openai_client import Client, Outcome, Upload, send_all
from benchmark.shared.server import BenchServer, serving

FIELDS = {"language": "en", "temperature": "0", "fallback": "false"}


# by the name of a model of the server: the system's name and the model's settings
Models = Mapping[str, tuple[str, dict[str, Any]]]


class System(Protocol):
    """An engine that is loaded and takes WAV files."""

    @property
    def name(self) -> str: ...

    def run(self, files: Sequence[Path], in_flight: int) -> list[Heard]: ...


@dataclass(frozen=True, slots=True)
class Splitscribe:
    """One model of a running server."""

    name: str
    server: BenchServer
    model: str

    def run(self, files: Sequence[Path], in_flight: int) -> list[Heard]:
        outcomes = self._send(files, in_flight, {"response_format": "json"})
        return [Heard(outcome.text, 0, outcome.latency) for outcome in outcomes]

    def n_tokens(self, file: Path) -> int:
        """Of one request, by the tokens of its segments."""
        (outcome,) = self._send([file], 1, {"stream": "true"})
        return outcome.output_tokens or 0

    def _send(self, files: Sequence[Path], n: int, fields: Mapping[str, str]) -> list[Outcome]:
        async def send() -> list[Outcome]:
            form = {"model": self.model, **FIELDS, **fields}
            uploads = [Upload.of(file.read_bytes(), file.name, form) for file in files]
            async with Client(self.server.url) as client:
                return await send_all(client, uploads, n)

        outcomes = asyncio.run(send())
        failed = [outcome for outcome in outcomes if outcome.failure]
        if failed:
            raise SystemExit(f"{self.name}: {failed[0].failure} {failed[0].error}")
        return outcomes


@contextmanager
def our_server(models: Models) -> Iterator[list[Splitscribe]]:
    """One server of several models, each of which is a system of its own."""
    settings = {model: fields for model, (_, fields) in models.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.yaml"
        file.write_text(yaml.safe_dump({"models": settings, "log_level": "WARNING"}))
        with serving("--config", str(file)) as server:
            yield [Splitscribe(name, server, model) for model, (name, _) in models.items()]


def by_dtype(key: str, folder: Path, dtypes: Sequence[str]) -> Models:
    """A checkpoint in every dtype, for `our_server`."""
    return {
        f"{key}-{dtype}": (
            f"splitscribe {dtype}",
            {"model": str(folder), "encoder": {"dtype": dtype}, "decoder": {"dtype": dtype}},
        )
        for dtype in dtypes
    }
