"""A decoder layer as few kernels as it may have on a GPU, in two ways over the same weights.

`FewRowsLayer` has nine: six products that take norms, biases, GELU and sums along (`FewRows`), an
append and two attentions. Every program of a product reads all rows, so it is for few of them.
`ManyRowsLayer` has twelve: the products are the library's, between them three norms that take the
residual add and its bias along, an append and two attentions. Up to `MAX_ROWS` the feed-forward's
first product takes GELU along; for more rows GELU is a kernel of its own.

Knows no batches and no pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.kernels.gpu.norm import Pending
from cluster.common.kernels.gpu.product import MAX_ROWS, FewRows
from cluster.common.model.layers import LayerNorm, Linear, as_loaded
from decoder_worker.attention.base import ProjectedAttention
from decoder_worker.model import DecoderLayer


@dataclass(frozen=True, slots=True)
class FewRowsLayer:
    """The sums go into the residual stream where it stands."""

    qkv: FewRows
    self_out: FewRows
    cross_q: FewRows
    cross_out: FewRows
    fc1: FewRows
    fc2: FewRows

    @classmethod
    def of(cls, layer: DecoderLayer) -> FewRowsLayer:
        """Shares the layer's weights."""
        return cls(
            qkv=FewRows.of(as_loaded(layer.self_qkv), layer.self_norm),
            self_out=FewRows.of(as_loaded(layer.self_out)),
            cross_q=FewRows.of(as_loaded(layer.cross_q), layer.cross_norm),
            cross_out=FewRows.of(as_loaded(layer.cross_out)),
            fc1=FewRows.of(as_loaded(layer.mlp.fc1), layer.mlp.norm),
            fc2=FewRows.of(as_loaded(layer.mlp.fc2)),
        )

    def __call__(self, index: int, x: Tensor, n_head: int, attention: ProjectedAttention) -> None:
        """x [n, n_text_state], the residual stream, contiguous. Mutates it."""
        qkv = _room(x, self.qkv.weight)
        self.qkv(x, qkv)
        self.self_out.add_to(x, attention.attend_projected(index, qkv, None).flatten(1))
        q = _room(x, self.cross_q.weight)
        self.cross_q(x, q)
        q = q.view(len(x), n_head, -1)
        self.cross_out.add_to(x, attention.cross_attention(index, q).flatten(1))
        wide = _room(x, self.fc1.weight)
        self.fc1.gelu(x, wide)
        self.fc2.add_to(x, wide)


@dataclass(frozen=True, slots=True)
class ManyRowsLayer:
    """Each half leaves its sum to the next one's norm."""

    self_norm: LayerNorm
    self_qkv: Linear
    self_out: Linear
    cross_norm: LayerNorm
    cross_q: Linear
    cross_out: Linear
    mlp_norm: LayerNorm
    fc1: Linear
    fc1_few: FewRows
    fc2: Linear

    @classmethod
    def of(cls, layer: DecoderLayer) -> ManyRowsLayer:
        """Shares the layer's weights."""
        fc1 = as_loaded(layer.mlp.fc1)
        return cls(
            self_norm=layer.self_norm,
            self_qkv=as_loaded(layer.self_qkv),
            self_out=as_loaded(layer.self_out),
            cross_norm=layer.cross_norm,
            cross_q=as_loaded(layer.cross_q),
            cross_out=as_loaded(layer.cross_out),
            mlp_norm=layer.mlp.norm,
            fc1=fc1,
            fc1_few=FewRows.of(fc1),
            fc2=as_loaded(layer.mlp.fc2),
        )

    def __call__(
        self, index: int, x: Tensor, n_head: int, attention: ProjectedAttention, pending: Pending
    ) -> Pending:
        """x as above, and what the layer before left to be added to it. Mutates x."""
        qkv = _product(pending.add_norm(x, self.self_norm), self.self_qkv)
        mixed = attention.attend_projected(index, qkv, self.self_qkv.bias).flatten(1)
        pending = Pending(_product(mixed, self.self_out), self.self_out.bias)
        q = self.cross_q(pending.add_norm(x, self.cross_norm)).view(len(x), n_head, -1)
        mixed = attention.cross_attention(index, q).flatten(1)
        pending = Pending(_product(mixed, self.cross_out), self.cross_out.bias)
        wide = self._widened(pending.add_norm(x, self.mlp_norm))
        return Pending(_product(wide, self.fc2), self.fc2.bias)

    def _widened(self, normed: Tensor) -> Tensor:
        if len(normed) > MAX_ROWS:
            return F.gelu(self.fc1(normed))
        wide = _room(normed, self.fc1.weight)
        self.fc1_few.gelu(normed, wide)
        return wide


def _product(x: Tensor, linear: Linear) -> Tensor:
    """Without the bias."""
    return torch.mm(x, linear.weight.t())


def _room(x: Tensor, weight: Tensor) -> Tensor:
    """For a product of rows of `x` with `weight`."""
    return torch.empty((len(x), len(weight)), dtype=weight.dtype, device=x.device)
