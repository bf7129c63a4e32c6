"""What one kind of worker was measured, or is predicted, to take: the data of a profile.

A profile is one JSON file. It holds seconds and bytes and no decisions: what is done with them is
the business of `cluster.planning.simulation`. `splitscribe profile` writes one; several come with
the package (`shipped_profiles`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.errors import ConfigurationError
from cluster.kv.layout import KVLayout, StatesLayout
from cluster.model.dims import ModelDims

Seconds = float


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shape(_Frozen):
    """Of the model that was measured, as far as its KV and its decoder's text depend on it."""

    n_audio_ctx: int = Field(1500, ge=1, description="encoder positions of a window")
    n_audio_state: int = Field(ge=1, description="width of the encoder")
    n_text_ctx: int = Field(448, ge=1, description="decoder positions")
    n_text_state: int = Field(ge=1, description="width of the decoder")
    n_text_head: int = Field(ge=1, description="heads of the decoder")
    n_text_layer: int = Field(ge=1, description="layers of the decoder")

    @classmethod
    def of(cls, dims: ModelDims) -> Shape:
        return cls(**{name: getattr(dims, name) for name in cls.model_fields})


class EncodePoint(_Frozen):
    """One batch: windows in it, encoder positions of each, and its seconds, with the projection."""

    batch: int = Field(ge=1)
    positions: int = Field(ge=1)
    seconds: Seconds = Field(gt=0)


class EncoderProfile(_Frozen):
    """max_batch, export_windows: what `auto` gives on this device."""

    points: tuple[EncodePoint, ...] = Field(min_length=1)
    max_batch: int = Field(ge=1)
    export_windows: int = Field(ge=1)
    overlaps: bool = Field(False, description="the next batch is launched before this one is done")


class StepPoint(_Frozen):
    """One forward of the decoder: rows, encoder positions that each attends to, and seconds."""

    rows: int = Field(ge=1)
    positions: int = Field(ge=1)
    seconds: Seconds = Field(gt=0)


class DecoderProfile(_Frozen):
    """steps: decode steps; prefills: prompts of so many sequences. The others as `auto` gives."""

    steps: tuple[StepPoint, ...] = Field(min_length=1)
    prefills: tuple[StepPoint, ...] = Field(min_length=1)
    max_batch: int = Field(ge=1)
    kv_windows: int = Field(ge=1)
    steps_ahead: int = Field(0, ge=0, le=1)
    projection_s: Seconds = Field(0.0, ge=0, description="KV of one window, from encoder states")


class LinkProfile(_Frozen):
    """How KV moves between two workers: seconds of a READ are latency and bytes over the rate."""

    transport: str
    latency_s: Seconds = Field(ge=0)
    bytes_per_s: float = Field(gt=0)


class RouterProfile(_Frozen):
    """CPU seconds of a router's event loop; `hop_s` is the way to a worker and back, of a call."""

    request_s: Seconds = Field(ge=0)
    window_s: Seconds = Field(ge=0)
    hop_s: Seconds = Field(ge=0)


class AudioProfile(_Frozen):
    """CPU seconds of the processes that decode and cut uploads."""

    request_s: Seconds = Field(ge=0)
    audio_second_s: Seconds = Field(ge=0, description="for each second of audio")


class StartProfile(_Frozen):
    """Seconds from the order for a worker until it takes windows."""

    encoder: Seconds = Field(ge=0)
    decoder: Seconds = Field(ge=0)
    router: Seconds = Field(ge=0)


class Profile(_Frozen):
    """One machine's workers with one model."""

    format: Literal[1] = 1
    name: str
    predicted: bool = Field(description="computed from a roofline, and not measured")
    source: str = Field(description="how the figures came about, and under which load")
    machine: dict[str, str | int | float | list[str]] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    commit: str = ""
    model: str
    shape: Shape
    kv_dtype: str = "bfloat16"
    page_frames: int = Field(ge=1)
    encoder: EncoderProfile
    decoder: DecoderProfile
    handoff: LinkProfile
    router: RouterProfile
    audio: AudioProfile
    start_s: StartProfile

    def kv_layout(self) -> KVLayout:
        """Of the pages that the encoder exports and the decoder holds."""
        shape = self.shape
        return KVLayout(
            model=self.model,
            n_layer=shape.n_text_layer,
            n_head=shape.n_text_head,
            head_dim=shape.n_text_state // shape.n_text_head,
            n_frames=shape.n_audio_ctx,
            page_frames=self.page_frames,
            dtype=self.kv_dtype,
        )

    def states_layout(self) -> StatesLayout:
        """Of encoder states, where these travel."""
        shape = self.shape
        return StatesLayout(self.model, shape.n_audio_state, shape.n_audio_ctx, self.kv_dtype)

    def self_layout(self) -> KVLayout:
        """Of the decoder's self-attention KV, a page for each row."""
        shape = self.shape
        return KVLayout(
            model="self",
            n_layer=shape.n_text_layer,
            n_head=shape.n_text_head,
            head_dim=shape.n_text_state // shape.n_text_head,
            n_frames=shape.n_text_ctx,
            page_frames=shape.n_text_ctx,
            dtype=self.kv_dtype,
        )


Knot = tuple[float, float]  # size, seconds


class Surface:
    """Seconds by a size (windows or rows) and a length (encoder positions)."""

    def __init__(self, points: Iterable[tuple[int, int, float]]) -> None:
        """points: size, length, seconds; at least one. For each length its own sizes."""
        by_length: dict[int, list[Knot]] = {}
        for size, length, seconds in points:
            by_length.setdefault(length, []).append((size, seconds))
        self._lines = [(length, sorted(knots)) for length, knots in sorted(by_length.items())]
        self._least_s = min(seconds for _, knots in self._lines for _, seconds in knots)
        self._known: dict[tuple[int, int], float] = {}

    def at(self, size: int, length: int) -> float:
        """Seconds for this size at this length."""
        key = (size, length)
        found = self._known.get(key)
        if found is None:
            knots = [(float(at), _on_line(line, size)) for at, line in self._lines]
            found = self._known[key] = max(self._least_s, _on_line(knots, length))
        return found


def _on_line(knots: list[Knot], x: float) -> float:
    if len(knots) == 1:
        return knots[0][1]
    upper = min(max(1, bisect_left(knots, (x, float("-inf")))), len(knots) - 1)
    (x0, y0), (x1, y1) = knots[upper - 1], knots[upper]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


FOLDER = Path(__file__).parent / "profiles"


def shipped_profiles() -> dict[str, Path]:
    """The profiles of the package, by name."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.json"))}


def load_profile(name: str) -> Profile:
    """A shipped profile by its name, or any by the path of its file.

    Raises:
        ConfigurationError: there is none, or the file is no profile.
    """
    file = shipped_profiles().get(name, Path(name))
    try:
        return Profile.model_validate_json(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError) as error:
        names = ", ".join(shipped_profiles())
        raise ConfigurationError(
            f"no profile is called {name!r}, and it is no file; the package has: {names}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the profile {name}: {error}") from error
    except ValidationError as error:
        raise ConfigurationError(f"{name} is not a profile: {first_problem(error)}") from error


def save_profile(profile: Profile, file: Path) -> None:
    """Write a profile, over what was there.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        file.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error}") from error


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's complaints, with the place of the field that it is about."""
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    return f"{place}: {problem['msg']}"
