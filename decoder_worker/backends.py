"""Chooses how a worker computes its decoder, once when the worker is built.

On a GPU: flashinfer's attention, and layers by Triton kernels or torch. On a CPU one compiled
program runs whole steps of few rows, and torch everything else, with its own copy of the weights
unless the model is large.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from cluster.common.errors import ConfigurationError
from cluster.common.extras import install_command
from cluster.common.kernels.cpu.tile_registers import products_for
from cluster.common.kernels.gpu.kernels import has_triton
from cluster.common.kernels.gpu.self_check import FLASHINFER, KERNELS, TORCH, is_right, turned_off
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.dims import ModelDims
from cluster.common.model.kv_scales import kv_scales
from cluster.common.model.layers import MLP, LayerNorm, Linear
from cluster.common.settings import Attention
from decoder_worker.attention.base import (
    AttentionBackend,
    MakeFixed,
    ProjectedAttention,
)
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.cpu.arrays import Layers, Products, fits_tiles, plain_head, stack_layers
from decoder_worker.cpu.fused import FusedDecoder, fits_layers, fits_pools
from decoder_worker.cpu.step_team import StepTeam
from decoder_worker.gpu.decoder import GpuDecoder
from decoder_worker.gpu.greedy import GpuSampler
from decoder_worker.gpu.look import exact_steps, steps
from decoder_worker.model import DecoderLayer, DecoderTensors, TextDecoder, TorchDecoder
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import Sampler, TorchSampler
from decoder_worker.sampling.slots import SlotTable

logger = logging.getLogger(__name__)

FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)
FLASHINFER_KV_DTYPES = (*FLASHINFER_DTYPES, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Attentions:
    """Attention backends over one pair of pools.

    fixed: makes backends for forwards of fixed sizes; None: `ragged` computes these too. team:
        threads for a CPU's compiled kernels; None if these do not take the pools. projected:
        `ragged` if it takes fused projections, as those of `fixed` then do.
    """

    ragged: AttentionBackend
    fixed: MakeFixed | None = None
    team: StepTeam | None = None
    projected: ProjectedAttention | None = None


@dataclass(frozen=True, slots=True)
class Decoders:
    """One checkpoint's decoder, in the ways that a worker computes it.

    ragged: for any forward. fixed: as in `Attentions`.
    torch: the reference, whose attention backend can be replaced.
    several: `ragged` if it can run greedy decode steps whole; else None.
    """

    ragged: TextDecoder
    torch: TorchDecoder
    fixed: Callable[[int, int, int], TextDecoder] | None = None
    several: FusedDecoder | None = None


MakeDecoders = Callable[[TorchDecoder, Attentions], Decoders]


def choose_attention(
    setting: Attention,
    self_pool: Tensor,
    cross_pool: Tensor,
    threads: int = 1,
    *,
    packed: bool = False,
) -> Attentions:
    """Choose attention backends for two pools; `packed` as in `TorchAttention`.

    threads: share out forwards of few rows (CPU). Raises ConfigurationError if flashinfer is asked
    for but cannot serve these pools.
    """
    if setting == "torch" or (setting == "auto" and self_pool.device.type == "cpu"):
        attentions = torch_attention(self_pool, cross_pool, packed=packed)
        if setting == "auto" and fits_pools(self_pool, cross_pool):
            return replace(attentions, team=StepTeam(threads - 1))
        return attentions
    why_not = _why_no_flashinfer(self_pool, cross_pool)
    if why_not is None:
        from decoder_worker.attention.flashinfer_backend import FlashInfer

        kernels = FlashInfer(self_pool, cross_pool)
        ragged = kernels.ragged()
        return Attentions(ragged, kernels.fixed, projected=ragged)
    if setting == "flashinfer":
        raise ConfigurationError(f"decoder.attention is 'flashinfer', but {why_not}")
    logger.warning("attention by torch, far slower than flashinfer's: %s", why_not)
    return torch_attention(self_pool, cross_pool)


def torch_attention(self_pool: Tensor, cross_pool: Tensor, *, packed: bool = False) -> Attentions:
    return Attentions(TorchAttention(self_pool, cross_pool, packed=packed))


def load_decoders(
    checkpoint: Checkpoint,
    attentions: Attentions,
    self_pool: Tensor,
    cross_pool: Tensor,
    *,
    int8: bool = False,
    packed: bool = False,
) -> Decoders:
    """Load a decoder for the self pool's device and dtype; `packed` as in `TorchAttention`.

    int8: hold the weights of matrix products in 8 bits (CPU). Raises CheckpointError.
    """
    dtype, team = self_pool.dtype, attentions.team
    scales = kv_scales(checkpoint, cross_pool.dtype)
    if team is None or not fits_layers(checkpoint.dims):
        tensors = DecoderTensors.load(checkpoint, dtype, self_pool.device, scales=scales)
        decoder = TorchDecoder.of(tensors, attentions.ragged, int8=int8)
        on_cpu = attentions.projected is None and self_pool.device.type == "cpu"
        if on_cpu:
            return _by_torch(decoder, attentions)
        return fastest(decoder, attentions, self_pool, cross_pool)
    is_bfloat16 = dtype == torch.bfloat16
    fits = fits_tiles(checkpoint.dims)
    tiles = products_for(bfloat16=is_bfloat16, int8=int8) if fits else None
    # For a small model the head is most of what a step reads, and 8 bits of it are enough.
    int8_head = int8 or is_bfloat16
    head_tiles = products_for(bfloat16=is_bfloat16, int8=int8_head) if fits else None
    tensors = DecoderTensors.load(checkpoint, dtype, "cpu", scales)
    shared = shares_weights(tensors.dims, dtype, int8=int8)
    blocks = tiles is not None and not shared
    arrays = stack_layers(tensors.by_name, tensors.dims, int8=int8, tiles=tiles, blocks=blocks)
    layers = layers_over(tensors, arrays) if shared else None
    many = TorchDecoder.of(
        tensors, attentions.ragged, int8=int8, int8_head=int8_head, layers=layers
    )
    head = plain_head(tensors.head, int8=int8_head, tiles=head_tiles)
    pools = (self_pool, cross_pool)
    few = FusedDecoder(tensors.dims, many, pools, team, arrays, head, packed=packed)
    return Decoders(few, many, several=few)


def fastest(
    decoder: TorchDecoder, attentions: Attentions, self_pool: Tensor, cross_pool: Tensor
) -> Decoders:
    """Use our kernels over flashinfer's attention, as far as both load and are right.

    The check runs the first layer, first over the attention alone, because our kernels build on it.
    Overwrites the pools' first pages. Raises ConfigurationError if torch's own layers are wrong.
    """
    pools = (self_pool, cross_pool)
    first = replace(decoder, layers=decoder.layers[:1])
    plain = partial(exact_steps, first, *pools)

    def right(way: str, make: MakeDecoders, over: Attentions) -> bool:
        made = make(first, over)
        return is_right(way, partial(steps, made.ragged, made.fixed, *pools), plain)

    if attentions.projected is not None:
        if right(FLASHINFER, _by_torch, attentions):
            if not has_triton():
                logger.warning(
                    "the decoder's layers run by torch, in more kernels: Triton does not load"
                )
            elif right(KERNELS, _by_kernels, attentions):
                return _by_kernels(decoder, attentions)
            return _by_torch(decoder, attentions)
        attentions = torch_attention(*pools)
    if right(TORCH, _by_torch, attentions):
        return _by_torch(decoder, attentions)
    raise ConfigurationError(
        f"this GPU's products in {self_pool.dtype} are wrong: {turned_off[TORCH]}; set "
        "decoder.dtype to float32, and tell who maintains its driver and torch"
    )


def _by_kernels(decoder: TorchDecoder, attentions: Attentions) -> Decoders:
    fixed = attentions.fixed
    assert attentions.projected is not None
    fewer = GpuDecoder(decoder, attentions.projected)
    return Decoders(
        fewer, decoder, None if fixed is None else lambda *sizes: fewer.over(fixed(*sizes))
    )


def _by_torch(decoder: TorchDecoder, attentions: Attentions) -> Decoders:
    own, fixed = decoder.over(attentions.ragged), attentions.fixed
    return Decoders(own, own, None if fixed is None else lambda *sizes: own.over(fixed(*sizes)))


def choose_sampler(rules: LogitRules, slots: SlotTable) -> Sampler:
    sampler = TorchSampler(rules, slots)
    if slots.device.type == "cpu" or not has_triton():
        return sampler
    by_kernels = GpuSampler(sampler, rules, slots)
    return by_kernels if by_kernels.is_right() else sampler


def _why_no_flashinfer(self_pool: Tensor, cross_pool: Tensor) -> str | None:
    """Return why flashinfer's kernels do not take these pools, or None."""
    head_dim = self_pool.shape[-1]
    if self_pool.device.type != "cuda":
        return f"the KV pools are on {self_pool.device.type!r}"
    if head_dim not in FLASHINFER_HEAD_DIMS:
        return f"heads have {head_dim} dimensions, its kernels {FLASHINFER_HEAD_DIMS}"
    if self_pool.dtype not in FLASHINFER_DTYPES or cross_pool.dtype not in FLASHINFER_KV_DTYPES:
        return f"it has no kernels for {self_pool.dtype} over {cross_pool.dtype}"
    if importlib.util.find_spec("flashinfer") is None:
        return f"it is not installed: {install_command('gpu')}"
    return None


SHARED_FROM_BYTES = 512 << 20  # base 44 MB, small 198 MB, turbo 184 MB, large-v3 1.5 GB in bfloat16


def shares_weights(dims: ModelDims, dtype: torch.dtype, *, int8: bool) -> bool:
    """Whether torch shares the layers, since a copy is too large. It cannot share 8-bit ones."""
    d, n_ffn = dims.n_text_state, dims.n_text_ffn
    n_weights = dims.n_text_layer * (6 * d * d + 2 * d * n_ffn)
    return not int8 and n_weights * dtype.itemsize >= SHARED_FROM_BYTES


def layers_over(tensors: DecoderTensors, layers: Layers) -> tuple[DecoderLayer, ...]:
    """Torch's layers over views of the matrices of `layers`, which lie in rows."""

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
