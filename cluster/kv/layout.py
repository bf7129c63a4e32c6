"""Page-major layout of cross-attention KV: one page holds all layers' K and V.

A page is `[layer, 2, page_frames, head, head_dim]`, contiguous, so that one page is one
descriptor for a transfer and neighbouring pages coalesce. Knows no torch and no transport.

Example: 1500 frames in pages of 64 frames take 24 pages; the last holds 28 frames.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

FLOAT8 = "float8_e4m3fn"  # 1 sign, 4 exponent and 3 mantissa bits; up to 448, no infinity
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FLOAT8: 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What both ends of a hand-off must agree on, to the byte.

    model: fingerprint of the checkpoint, so that equal shapes of other weights are refused.
    """

    model: str
    n_layer: int
    n_head: int
    head_dim: int
    n_frames: int  # encoder positions in a window, 1500
    page_frames: int
    dtype: str  # a key of ITEM_BYTES

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is none of {sorted(ITEM_BYTES)}")
        if not 1 <= self.page_frames <= self.n_frames:
            raise ValueError(f"page_frames {self.page_frames} is not in 1..{self.n_frames}")

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.n_layer, 2, self.page_frames, self.n_head, self.head_dim)

    @property
    def page_bytes(self) -> int:
        n = 1
        for size in self.page_shape:
            n *= size
        return n * ITEM_BYTES[self.dtype]

    @property
    def pages_per_window(self) -> int:
        return self.pages_for(self.n_frames)

    def pages_for(self, frames: int) -> int:
        """Pages that `frames` encoder frames take, the last one perhaps partly filled."""
        return -(-frames // self.page_frames)

    @property
    def hash(self) -> str:
        """Hex digest that differs whenever any field differs."""
        text = repr(sorted(asdict(self).items()))
        return hashlib.sha256(text.encode()).hexdigest()[:32]
