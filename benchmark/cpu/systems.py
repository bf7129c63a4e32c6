"""Our server for `benchmark.cpu`, and the rows of its results."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmark.rivals.engines import Heard, RivalProcess
from benchmark.shared.openai_client import Client, Outcome, Upload, send_all
from benchmark.shared.server import BenchServer, serving
from benchmark.shared.word_errors import WordErrors, interval, total

OURS = "splitscribe"
IN_FLIGHT = (1, 8)
TRIMMED = "trimmed"  # behind a dtype: the encoder computes only the audio and some slack
FIELDS = {"language": "en", "temperature": "0", "fallback": "false"}
# The text of random weights fails these checks, and its window would be encoded twice.
UNDOUBTED = {"logprob_threshold": "none", "compression_ratio_threshold": "none"}
KV_FLOAT8 = "float8-KV"  # behind a dtype: cross-attention KV lies in pages of 8 bits

# the system's name and the model's settings, by the model's name on the server
Models = Mapping[str, tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Splitscribe:
    name: str
    server: BenchServer
    model: str
    fields: Mapping[str, str] = field(default_factory=dict)  # of every request, beside `FIELDS`

    def run(self, files: Sequence[Path], in_flight: int) -> list[Heard]:
        outcomes = self._send(files, in_flight, {"response_format": "json"})
        return [Heard(outcome.text, 0) for outcome in outcomes]

    def n_tokens(self, file: Path) -> int:
        (outcome,) = self._send([file], 1, {"response_format": "verbose_json"})
        return sum(len(segment["tokens"]) for segment in outcome.answer["segments"])

    def _send(self, files: Sequence[Path], n: int, fields: Mapping[str, str]) -> list[Outcome]:
        async def send() -> list[Outcome]:
            form = {"model": self.model, **FIELDS, **self.fields, **fields}
            uploads = [Upload.of(file.read_bytes(), file.name, form) for file in files]
            async with Client(self.server.url) as client:
                return await send_all(client, uploads, n)

        outcomes = asyncio.run(send())
        failed = [outcome for outcome in outcomes if outcome.failure]
        if failed:
            raise SystemExit(f"{self.name}: {failed[0].failure} {failed[0].error}")
        return outcomes


System = Splitscribe | RivalProcess  # an engine that is loaded and takes WAV files


@contextmanager
def our_server(
    models: Models, fields: Mapping[str, str] | None = None, placement: str = "auto"
) -> Iterator[list[Splitscribe]]:
    settings = {model: fields for model, (_, fields) in models.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.yaml"
        of_all = {"log_level": "WARNING", "placement": placement}
        file.write_text(yaml.safe_dump({"models": settings, **of_all}))
        with serving("--config", str(file)) as server:
            yield [
                Splitscribe(name, server, model, fields or {})
                for model, (name, _) in models.items()
            ]


def by_dtype(key: str, folder: Path, kinds: Sequence[str], device: str = "auto") -> Models:
    models = {}
    for kind in kinds:
        role = {"dtype": dtype_of(kind), "device": device}
        encoder: dict[str, Any] = {**role, "context": "full"}
        if TRIMMED in kind:
            encoder |= {"context": "trimmed", "context_slack": 64, "context_max_s": 30.0}
        settings = {
            "model": str(folder),
            "kv_dtype": "float8" if KV_FLOAT8 in kind else "auto",
            "encoder": encoder,
            "decoder": role,
        }
        models[f"{key}-{kind.replace(' ', '-')}"] = (f"splitscribe {kind}", settings)
    return models


def dtype_of(kind: str) -> str:
    return kind.split()[0]


@dataclass
class Row:
    """`rate` has the files/s of each round by the number in flight."""

    system: str
    rate: dict[int, list[float]] = field(default_factory=dict)
    n_tokens: int = 0

    def median_rate(self, in_flight: int) -> float:
        return statistics.median(self.rate[in_flight])


def row_json(shape: str, row: Row, errors: Mapping[str, Sequence[WordErrors]]) -> dict[str, Any]:
    counted = errors.get(row.system)
    return {
        "shape": shape,
        "system": row.system,
        "n_tokens": row.n_tokens,
        "files_per_s": {str(n): round(row.median_rate(n), 3) for n in IN_FLIGHT},
        "rates": {str(n): [round(rate, 3) for rate in row.rate[n]] for n in IN_FLIGHT},
        "wer": round(total(counted).wer, 3) if counted else None,
        "wer_interval": [round(bound, 3) for bound in interval(counted)] if counted else None,
    }
