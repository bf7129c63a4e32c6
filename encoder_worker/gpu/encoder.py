"""The encoder's forward on a GPU, of few kernels.

`AudioEncoder` stays the reference and is what runs where Triton does not load. On a CPU this runs
too, by the operators' plain twins: so it is tested, and so its word error rate is measured.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cluster.gpu.norm import Pending
from cluster.model.dims import ModelDims
from encoder_worker.gpu.layers import Float8Layer, PlainLayer
from encoder_worker.model import AudioEncoder


class Encoder(Protocol):
    """`AudioEncoder`, and what computes the same."""

    dims: ModelDims
    dtype: torch.dtype

    def __call__(self, mel: Tensor) -> Tensor:
        """As `AudioEncoder`'s."""


class GpuEncoder:
    """Implements `Encoder`."""

    def __init__(self, encoder: AudioEncoder, *, float8: bool = False) -> None:
        """Takes the layers out of `encoder`, which cannot be called afterwards.

        float8: hold the weights of the layers' products in 8 bits; the originals are freed.
        """
        self.dims, self.dtype = encoder.dims, encoder.dtype
        make = Float8Layer.of if float8 else PlainLayer.of
        self._encoder = encoder
        self._layers: list[Float8Layer | PlainLayer] = []
        while encoder.layers:
            self._layers.append(make(encoder.layers.pop(0)))

    def __call__(self, mel: Tensor) -> Tensor:
        x = self._encoder.embedded(mel)
        rows, pending = x.flatten(0, 1), Pending()  # a view
        for layer in self._layers:
            pending = layer(rows, len(mel), pending)
        return pending.add_norm(rows, self._encoder.norm).view(x.shape)
