"""Torch's decoder on the weights of the compiled program, for models where a second copy is much.

Torch multiplies fastest by weights in a layout of its own, which the compiled program does not
read. So a small model has both; of a large one torch takes the program's as they lie there, since
it computes only what has many rows, and the copy would be as large as the decoder.
"""

from __future__ import annotations

import torch

from cluster.model.dims import ModelDims
from cluster.model.layers import MLP, LayerNorm
from cluster.model.linear import Linear
from decoder_worker.cpu.fused_arrays import Layers, Products
from decoder_worker.model import DecoderLayer
from decoder_worker.tensors import DecoderTensors

SHARED_FROM_BYTES = 512 << 20  # base 44 MB, small 198 MB, turbo 184 MB, large-v3 1.5 GB in bfloat16


def shares_weights(dims: ModelDims, dtype: torch.dtype, *, int8: bool) -> bool:
    """Whether a second copy of the layers would be too much; 8-bit ones torch cannot take."""
    d, n_ffn = dims.n_text_state, dims.n_text_ffn
    n_weights = dims.n_text_layer * (6 * d * d + 2 * d * n_ffn)
    return not int8 and n_weights * dtype.itemsize >= SHARED_FROM_BYTES


def layers_over(tensors: DecoderTensors, layers: Layers) -> tuple[DecoderLayer, ...]:
    """Torch's layers whose matrices are views of `layers`, which are in rows.

    Norms and biases are copies.
    """

    def linear(products: Products, index: int) -> Linear:
        weight = torch.from_numpy(products.weight[index])
        if tensors.dtype == torch.bfloat16:
            weight = weight.view(torch.bfloat16)
        return Linear(weight, torch.from_numpy(products.bias[index]).to(tensors.dtype))

    def layer(index: int) -> DecoderLayer:
        prefix = f"decoder.layers.{index}"
        norm = {
            name: LayerNorm.load(tensors.by_name, f"{prefix}.{name}_layer_norm")
            for name in ("self_attn", "encoder_attn", "final")
        }
        return DecoderLayer(
            self_norm=norm["self_attn"],
            self_qkv=linear(layers.qkv, index),
            self_out=linear(layers.self_out, index),
            cross_norm=norm["encoder_attn"],
            cross_q=linear(layers.cross_q, index),
            cross_out=linear(layers.cross_out, index),
            mlp=MLP(norm["final"], linear(layers.fc1, index), linear(layers.fc2, index)),
        )

    return tuple(layer(index) for index in range(tensors.dims.n_text_layer))
