"""The decoder's forward on a GPU, of few kernels: the same weights, larger steps.

Implements `TextDecoder` beside `TorchDecoder`, which stays the reference and is what serves where
Triton does not load. On a CPU it runs too, by the operators' plain twins: so it is tested.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.common.kernels.gpu.norm import Pending
from cluster.common.kernels.gpu.product import INNER_MULTIPLE
from cluster.common.model.layers import Linear
from decoder_worker.attention.base import AttentionBatch, ProjectedAttention
from decoder_worker.gpu.embed import embed
from decoder_worker.gpu.layers import FewRowsLayer, ManyRowsLayer
from decoder_worker.model import TorchDecoder

# Beyond so many rows every program of `FewRows` reads more of them than the kernels that it saves
# would take: predicted by counting kernels and bytes, not measured on a GPU.
FEW_ROWS = 32
# `FewRows` rounds rows times a norm's gain before it norms them. Float16 ends at 65,504, which a
# few numbers of Whisper's residual stream times their gain may pass, so norms come first there.
NARROW = torch.float16


@dataclass(frozen=True, slots=True)
class GpuDecoder:
    """Shares all of the reference's weights.

    few_rows: up to so many rows take the layers of fewest kernels.
    """

    reference: TorchDecoder
    attention: ProjectedAttention
    few: tuple[FewRowsLayer, ...]
    many: tuple[ManyRowsLayer, ...]
    few_rows: int

    @classmethod
    def of(
        cls, reference: TorchDecoder, attention: ProjectedAttention, few_rows: int = FEW_ROWS
    ) -> GpuDecoder:
        """The reference's products must be as they were loaded, which they are on a GPU.

        few_rows: 0 in float16, whatever it is.
        """
        is_narrow = reference.embed_tokens.dtype is NARROW
        return cls(
            reference=reference,
            attention=attention,
            few=() if is_narrow else tuple(FewRowsLayer.of(layer) for layer in reference.layers),
            many=tuple(ManyRowsLayer.of(layer) for layer in reference.layers),
            few_rows=0 if is_narrow else few_rows,
        )

    def over(self, attention: ProjectedAttention) -> GpuDecoder:
        """The same weights over another attention backend."""
        return replace(self, attention=attention)

    def plan(self, batch: AttentionBatch) -> None:
        self.attention.plan(batch)

    def states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.attention.begin(positions)
        x = self._embedded(tokens, positions)
        n_head, pending = self.reference.n_head, Pending()
        if len(x) <= self.few_rows:
            for index, few in enumerate(self.few):
                few(index, x, n_head, self.attention)
        else:
            for index, many in enumerate(self.many):
                pending = many(index, x, n_head, self.attention, pending)
        norm = self.reference.norm
        return pending.add_norm(x, replace(norm, dtype=norm.weight.dtype))

    def logits(self, states: Tensor) -> Tensor:
        return self.reference.logits(states)

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        reference = self.reference
        by_token, by_position = reference.embed_tokens, reference.embed_positions
        dtype = reference.norm.weight.dtype  # the residual stream's
        shape = (len(tokens), by_token.shape[1])
        x = torch.empty(shape, dtype=dtype, device=by_token.device)
        embed(tokens, positions, by_token, by_position, x)
        return x


def takes(reference: TorchDecoder) -> bool:
    """Whether the kernels take a decoder's products: as they were loaded, of published sizes."""
    layer = reference.layers[0]
    products = (layer.self_qkv, layer.mlp.fc2)
    return all(
        isinstance(product, Linear) and product.weight.shape[1] % INNER_MULTIPLE == 0
        for product in products
    )
