"""Which attention a decoder computes with: flashinfer's kernels on a GPU, our own on a CPU.

Torch's is the reference, and what remains where neither fits.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cluster.errors import ConfigurationError
from cluster.settings import Attention
from decoder_worker.attention.base import AttentionBackend
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.cpu.attention import CpuAttention, fits_kernels

logger = logging.getLogger(__name__)

KERNEL_HEAD_DIMS = (64, 128, 256)
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_KV_DTYPES = (*KERNEL_DTYPES, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Attentions:
    """Backends over one pair of pools.

    ragged: for any forward. fixed: makes one for forwards of so many rows, each with a window of
    its own, of so many tokens each, which may be captured; one token: decode steps. None: these
    are ragged forwards too.
    """

    ragged: AttentionBackend
    fixed: Callable[[int, int], AttentionBackend] | None = None


def choose_attention(setting: Attention, self_pool: Tensor, cross_pool: Tensor) -> Attentions:
    """`setting` as in DecoderSettings; the pools as in `TorchAttention`.

    Raises:
        ConfigurationError: flashinfer was asked for and cannot serve these pools.
    """
    why_not = _why_no_kernels(self_pool, cross_pool)
    if setting == "auto" and fits_kernels(self_pool, cross_pool):
        return Attentions(CpuAttention(self_pool, cross_pool))
    if setting == "torch" or (setting == "auto" and self_pool.device.type == "cpu"):
        return torch_attention(self_pool, cross_pool)
    if why_not is None:
        from decoder_worker.attention.flashinfer_backend import FlashInfer

        kernels = FlashInfer(self_pool, cross_pool)
        return Attentions(kernels.ragged(), kernels.fixed)
    if setting == "flashinfer":
        raise ConfigurationError(f"decoder.attention is 'flashinfer', but {why_not}")
    logger.warning("attention by torch, far slower than flashinfer's: %s", why_not)
    return torch_attention(self_pool, cross_pool)


def torch_attention(self_pool: Tensor, cross_pool: Tensor, *, bucketed: bool = False) -> Attentions:
    """bucketed: with backends for fixed sizes too, as on a GPU."""
    make = partial(TorchAttention, self_pool, cross_pool)
    return Attentions(make(), (lambda n_rows, n_tokens: make()) if bucketed else None)


def _why_no_kernels(self_pool: Tensor, cross_pool: Tensor) -> str | None:
    """None where flashinfer's kernels take these pools."""
    head_dim = self_pool.shape[-1]
    if self_pool.device.type != "cuda":
        return f"the KV pools are on {self_pool.device.type!r}"
    if head_dim not in KERNEL_HEAD_DIMS:
        return f"heads have {head_dim} dimensions, its kernels {KERNEL_HEAD_DIMS}"
    if self_pool.dtype not in KERNEL_DTYPES or cross_pool.dtype not in KERNEL_KV_DTYPES:
        return f"it has no kernels for {self_pool.dtype} over {cross_pool.dtype}"
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed: pip install 'splitscribe[gpu]'"
    return None
