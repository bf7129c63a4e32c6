"""Profiles: measured or predicted times and sizes of one kind of worker, one JSON file each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, ValidationError

from cluster.common.errors import ConfigurationError
from cluster.common.kv.layout import PageLayout
from cluster.common.settings import FrozenModel
from cluster.common.settings_sources import first_problem

FOLDER = Path(__file__).parent / "profiles"


class Shape(FrozenModel):
    n_audio_ctx: PositiveInt = 1500
    n_audio_state: PositiveInt
    n_text_ctx: PositiveInt = 448
    n_text_state: PositiveInt
    n_text_head: PositiveInt
    n_text_layer: PositiveInt


class Point(FrozenModel):
    """Seconds of one launch. size: windows or rows. positions: of each window's context."""

    size: PositiveInt
    positions: PositiveInt
    seconds: float = Field(gt=0)


class EncoderProfile(FrozenModel):
    """points: batches, projection included. max_batch, export_windows: the values of `auto`."""

    points: tuple[Point, ...] = Field(min_length=1)
    max_batch: PositiveInt
    export_windows: PositiveInt


class DecoderProfile(FrozenModel):
    """prefills: prompts, by their number of sequences. The other sizes are those of `auto`."""

    steps: tuple[Point, ...] = Field(min_length=1)
    prefills: tuple[Point, ...] = Field(min_length=1)
    max_batch: PositiveInt
    kv_windows: PositiveInt
    steps_ahead: int = Field(0, ge=0, le=1)


class LinkProfile(FrozenModel):
    """A READ of KV takes the latency, and its bytes over the rate."""

    transport: str
    latency_s: NonNegativeFloat
    bytes_per_s: float = Field(gt=0)


class RouterProfile(FrozenModel):
    """CPU seconds of a router's event loop, and of the processes that decode and cut uploads.

    `request_s` was measured for router and proxy on two cores of an EPYC; the others are assumed.
    hop_s: round trip of a call to a worker.
    """

    request_s: NonNegativeFloat = 0.0048
    hop_s: NonNegativeFloat = 0.002
    audio_request_s: NonNegativeFloat = 0.004
    audio_second_s: NonNegativeFloat = 0.002


class Profile(FrozenModel):
    format: Literal[1] = 1
    name: str
    predicted: bool = Field(description="computed from a roofline, and not measured")
    source: str = Field(description="how the figures came about, and under which load")
    machine: dict[str, str | int | float | list[str]] = Field(default_factory=dict)
    commit: str = ""
    model: str
    shape: Shape
    kv_dtype: str = "bfloat16"
    page_frames: PositiveInt
    encoder: EncoderProfile
    decoder: DecoderProfile
    handoff: LinkProfile
    router: RouterProfile = RouterProfile()
    start_s: NonNegativeFloat = Field(description="of a worker, until it takes windows")

    def __str__(self) -> str:
        kind = "predicted, not measured" if self.predicted else "measured"
        return f"profile {self.name} ({kind}), model {self.model}"

    def with_decoder_of(self, other: Profile) -> Profile:
        if other is self:
            return self
        changes = {
            "name": f"{self.name}+{other.name}",
            "predicted": self.predicted or other.predicted,
            "source": f"encoder: {self.source}; decoder: {other.source}",
            "decoder": other.decoder,
        }
        return self.model_copy(update=changes)

    def origin(self) -> dict[str, Any]:
        return self.model_dump(include={"name", "model", "predicted", "source"})

    def kv_layout(self) -> PageLayout:
        shape = self.shape
        return PageLayout(
            model=self.model,
            n_layer=shape.n_text_layer,
            n_head=shape.n_text_head,
            head_dim=shape.n_text_state // shape.n_text_head,
            n_frames=shape.n_audio_ctx,
            page_frames=self.page_frames,
            dtype=self.kv_dtype,
        )


class Surface:
    """Seconds by size and positions: linear inter- and extrapolation, at least the smallest."""

    def __init__(self, points: Iterable[Point]) -> None:
        lines: dict[int, dict[float, float]] = {}
        for point in points:  # the last one of several at the same place counts
            lines.setdefault(point.positions, {})[point.size] = point.seconds
        self._lines = [(at, sorted(knots.items())) for at, knots in sorted(lines.items())]
        self._least_s = min(seconds for _, knots in self._lines for _, seconds in knots)
        self.at = cache(self._at)

    def _at(self, size: int, positions: int) -> float:
        knots = [(float(at), _on_line(line, size)) for at, line in self._lines]
        return max(self._least_s, _on_line(knots, positions))


def _on_line(knots: list[tuple[float, float]], x: float) -> float:
    if len(knots) == 1:
        return knots[0][1]
    upper = min(max(1, bisect_left(knots, (x, float("-inf")))), len(knots) - 1)
    (x0, y0), (x1, y1) = knots[upper - 1], knots[upper]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def shipped_profiles() -> dict[str, Path]:
    return {file.stem: file for file in sorted(FOLDER.glob("*.json"))}


def load_profile(name: str) -> Profile:
    """name: of a shipped profile, or the path of any."""
    file = shipped_profiles().get(name, Path(name))
    try:
        return Profile.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(shipped_profiles())
        raise ConfigurationError(
            f"no profile is called {name!r}, and no file can be read there ({error}); the package "
            f"has: {names}. `splitscribe profile` measures a machine"
        ) from error
    except ValidationError as error:
        raise ConfigurationError(f"{name} is not a profile: {first_problem(error)}") from error


def write_text(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error}") from error
