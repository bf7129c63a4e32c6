"""What a page holds: cross-attention KV or encoder states. No torch.

A page of KV is `[layer, 2, page_frames, head, head_dim]`, contiguous with all layers' K and V, so
that it is one descriptor for a transfer and neighbouring pages coalesce. A page of states is a
whole window, `[n_frames, n_state]`. 1500 frames in pages of 64 take 24 pages; the last holds 28.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass

from cluster.common.messages import Payload

FLOAT8 = "float8_e4m3fn"  # 1 sign, 4 exponent and 3 mantissa bits; up to 448, no infinity
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FLOAT8: 1}


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of a pool's pages, on which both ends must agree to the byte."""

    model: str  # the checkpoint's fingerprint
    n_layer: int
    n_head: int
    head_dim: int
    n_frames: int  # encoder positions in a window, 1500
    page_frames: int
    dtype: str  # a key of ITEM_BYTES
    payload: Payload = "cross_kv"

    @classmethod
    def of_states(cls, model: str, n_state: int, n_frames: int, dtype: str) -> PageLayout:
        return cls(model, 1, 1, n_state, n_frames, n_frames, dtype, "encoder_states")

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is none of {sorted(ITEM_BYTES)}")
        if not 1 <= self.page_frames <= self.n_frames:
            raise ValueError(f"page_frames {self.page_frames} is not in 1..{self.n_frames}")

    @property
    def page_shape(self) -> tuple[int, ...]:
        if self.payload == "encoder_states":
            return (self.n_frames, self.head_dim)
        return (self.n_layer, 2, self.page_frames, self.n_head, self.head_dim)

    @property
    def page_bytes(self) -> int:
        return math.prod(self.page_shape) * ITEM_BYTES[self.dtype]

    @property
    def pages_per_window(self) -> int:
        return self.pages_for(self.n_frames)

    def pages_for(self, frames: int) -> int:
        return -(-frames // self.page_frames)

    @property
    def hash(self) -> str:
        text = repr(sorted(asdict(self).items()))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def window_bytes(layout: PageLayout) -> int:
    return layout.pages_per_window * layout.page_bytes
