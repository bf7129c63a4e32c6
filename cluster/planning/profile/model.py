"""What one kind of worker was measured, or is predicted, to take: the data of a profile.

A profile is one JSON file. It holds seconds and bytes and no decisions: what is done with them is
the business of `cluster.planning.simulation`. `splitscribe profile` writes one; several come with
the package (`cluster.planning.profile.shipped`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

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
