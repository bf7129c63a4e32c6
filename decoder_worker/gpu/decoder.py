"""The decoder's forward on a GPU, of few kernels, over the weights of torch's.

Implements `TextDecoder` beside `TorchDecoder`, which stays the reference and is what serves where
Triton does not load. On a CPU it runs too, by the operators' plain twins: so it is tested.

A layer has thirteen kernels: six products by the library, between them three norms that take the
residual add and its bias along, GELU, an append and two attentions. Kernels of ours that took norms
and sums into the products as well, nine to a layer, were slower at every batch up to 32, all that
they were for, on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.kernels.gpu.operators import Pending
from cluster.common.model.layers import Linear, as_loaded
from decoder_worker.attention.base import AttentionBatch, ProjectedAttention
from decoder_worker.model import DecoderLayer, TorchDecoder


def run_layer(
    layer: DecoderLayer,
    index: int,
    x: Tensor,
    n_head: int,
    attention: ProjectedAttention,
    pending: Pending,
) -> Pending:
    """Each half of a layer leaves its sum to the next one's norm, the last to what is returned.

    x: [n, n_text_state], the residual stream; mutated. pending: what the layer before left.
    """
    self_qkv, self_out = as_loaded(layer.self_qkv), as_loaded(layer.self_out)
    cross_out, fc2 = as_loaded(layer.cross_out), as_loaded(layer.mlp.fc2)
    qkv = _product(pending.add_norm(x, layer.self_norm), self_qkv)
    mixed = attention.attend_projected(index, qkv, self_qkv.bias).flatten(1)
    pending = Pending(_product(mixed, self_out), self_out.bias)
    q = layer.cross_q(pending.add_norm(x, layer.cross_norm)).view(len(x), n_head, -1)
    mixed = attention.cross_attention(index, q).flatten(1)
    pending = Pending(_product(mixed, cross_out), cross_out.bias)
    wide = F.gelu(layer.mlp.fc1(pending.add_norm(x, layer.mlp.norm)))
    return Pending(_product(wide, fc2), fc2.bias)


def _product(x: Tensor, linear: Linear) -> Tensor:
    """Without the bias."""
    return torch.mm(x, linear.weight.t())


@dataclass(frozen=True, slots=True)
class GpuDecoder:
    """Shares all of the reference's weights, whose products are as they were loaded."""

    reference: TorchDecoder
    attention: ProjectedAttention

    def over(self, attention: ProjectedAttention) -> GpuDecoder:
        """The same weights over another attention backend."""
        return replace(self, attention=attention)

    def plan(self, batch: AttentionBatch) -> None:
        self.attention.plan(batch)

    def states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.attention.begin(positions)
        reference = self.reference
        x = reference.embed(tokens, positions)  # the residual stream
        pending = Pending()
        for index, layer in enumerate(reference.layers):
            pending = run_layer(layer, index, x, reference.n_head, self.attention, pending)
        return pending.add_norm(x, replace(reference.norm, dtype=x.dtype))

    def logits(self, states: Tensor) -> Tensor:
        return self.reference.logits(states)
