"""The decoder's forward on a GPU, in few kernels, over the weights of `TorchDecoder`.

A layer has thirteen: six products, three norms that add the residual and its bias, GELU, an append
and two attentions. On a CPU, for tests, it runs by the operators' plain twins.
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
    """Run a layer on x [n, n_text_state], mutated; returns the sum left to the next norm."""
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
    """Implements `TextDecoder` with the reference's weights, in the layout that was loaded."""

    reference: TorchDecoder
    attention: ProjectedAttention

    def over(self, attention: ProjectedAttention) -> GpuDecoder:
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
