"""The decoder's forward on a GPU, of few kernels, in two ways over the same weights.

Implements `TextDecoder` beside `TorchDecoder`, which stays the reference and is what serves where
Triton does not load. On a CPU it runs too, by the operators' plain twins: so it is tested.

`FewRowsLayer` has nine kernels: six products that take norms, biases, GELU and sums along
(`FewRows`), an append and two attentions. Every program of a product reads all rows, so it is for
few of them. `ManyRowsLayer` has twelve: the products are the library's, between them three norms
that take the residual add and its bias along, an append and two attentions. Up to `MAX_ROWS` the
feed-forward's first product takes GELU along; for more rows GELU is a kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.kernels.gpu.kernels import define, launcher, nothing
from cluster.common.kernels.gpu.operators import INNER_MULTIPLE, MAX_ROWS, FewRows, Pending
from cluster.common.model.layers import LayerNorm, Linear, as_loaded
from decoder_worker.attention.base import AttentionBatch, ProjectedAttention
from decoder_worker.model import DecoderLayer, TorchDecoder

# Beyond so many rows every program of `FewRows` reads more of them than the kernels that it saves
# would take: predicted by counting kernels and bytes, not measured on a GPU.
FEW_ROWS = 32
# `FewRows` rounds rows times a norm's gain before it norms them. Float16 ends at 65,504, which a
# few numbers of Whisper's residual stream times their gain may pass, so norms come first there.
NARROW = torch.float16


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


def _plain_embed(
    tokens: Tensor, positions: Tensor, by_token: Tensor, by_position: Tensor, out: Tensor
) -> None:
    """out [n, d] = by_token[tokens] + by_position[positions], rounded once.

    tokens, positions: int64 [n], of any stride; the others are contiguous, of any float dtype.
    """
    out.copy_(by_token[tokens].float() + by_position[positions].float())


embed = define(
    "embed",
    writes=("out",),
    cuda=launcher("decoder_worker.gpu.kernels", "launch_embed"),
    cpu=_plain_embed,
    shapes=nothing,
)


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
        reference = self.reference
        by_token, by_position = reference.embed_tokens, reference.embed_positions
        shape, dtype = (len(tokens), by_token.shape[1]), reference.norm.weight.dtype
        x = torch.empty(shape, dtype=dtype, device=by_token.device)  # the residual stream
        embed(tokens, positions, by_token, by_position, x)
        n_head, pending = reference.n_head, Pending()
        if len(x) <= self.few_rows:
            for index, few in enumerate(self.few):
                few(index, x, n_head, self.attention)
        else:
            for index, many in enumerate(self.many):
                pending = many(index, x, n_head, self.attention, pending)
        return pending.add_norm(x, replace(reference.norm, dtype=dtype))

    def logits(self, states: Tensor) -> Tensor:
        return self.reference.logits(states)


def takes(reference: TorchDecoder) -> bool:
    """Whether the kernels take a decoder's products: as they were loaded, of published sizes."""
    layer = reference.layers[0]
    products = (layer.self_qkv, layer.mlp.fc2)
    return all(
        isinstance(product, Linear) and product.weight.shape[1] % INNER_MULTIPLE == 0
        for product in products
    )
