"""Embeddings of tokens and of their positions, summed: one kernel."""

from __future__ import annotations

from torch import Tensor

from cluster.common.kernels.gpu.kernels import launcher
from cluster.common.model.operators import define, nothing


def embed(
    tokens: Tensor, positions: Tensor, by_token: Tensor, by_position: Tensor, out: Tensor
) -> None:
    """out = by_token[tokens] + by_position[positions], rounded once. Mutates `out`.

    Args:
        tokens, positions: int64 [n], of any stride.
        by_token: [n_vocab, d]. by_position: [n_text_ctx, d].
        out: [n, d] of any float dtype. These three are contiguous.
    """
    _operator(tokens, positions, by_token, by_position, out)


def _plain(
    tokens: Tensor, positions: Tensor, by_token: Tensor, by_position: Tensor, out: Tensor
) -> None:
    out.copy_(by_token[tokens].float() + by_position[positions].float())


_operator = define(
    "embed",
    writes=("out",),
    cuda=launcher("decoder_worker.gpu.embed_kernel"),
    cpu=_plain,
    shapes=nothing,
)
