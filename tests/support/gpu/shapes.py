"""Models of the published sizes without any weights, for a simulated GPU that knows shapes only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cluster.common.kv.connect import kv_layout
from cluster.common.kv.pool import PagePool
from cluster.common.model import streams
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.backends import choose_attention, load_decoders
from decoder_worker.model_runner import ModelRunner, self_kv_layout
from encoder_worker.forward import WindowEncoder
from tests.support.checkpoints import SHAPES, generation_config, model_config, tokenizer_definition
from tests.support.gpu.device import SimulatedGpu
from tests.support.gpu.one_gpu import simulated_one_gpu
from tests.support.gpu.runtime import SimulatedRuntime

LOADERS = (
    "cluster.common.kv.cross_kv",
    "cluster.common.model.kv_scales",
    "decoder_worker.model",
    "encoder_worker.model",
)


DTYPE = "bfloat16"


@contextmanager
def shapes_only() -> Iterator[tuple[SimulatedGpu, SimulatedRuntime]]:
    """A simulated GPU without values, onto which weights are loaded from nowhere."""
    with ExitStack() as stack:
        both = stack.enter_context(simulated_one_gpu(values="meta"))
        stack.enter_context(patch.object(streams, "WARM_UPS", 0))
        for module in LOADERS:
            stack.enter_context(patch(f"{module}.load_tensors", _load))
        yield both


def _load(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    return {name: torch.ones(shape, dtype=dtype, device=device) for name, shape in shapes.items()}


def described(family: str) -> Checkpoint:
    """A checkpoint of one of `SHAPES` that has no weights."""
    checkpoint = open_checkpoint(str(_folder(family)), weights=False)
    checkpoint.__dict__.update(tensors={}, fingerprint=family)
    return checkpoint


@cache
def _folder(family: str) -> Path:
    folder, shape = Path(mkdtemp(prefix="splitscribe-shapes-")), SHAPES[family]
    files: dict[str, Any] = {
        "config.json": model_config(shape),
        "generation_config.json": generation_config(shape),
        "tokenizer.json": tokenizer_definition(shape),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def make_runner(family: str, max_batch: int, kv_dtype: str = DTYPE) -> ModelRunner:
    """A runner, which has captured its graphs."""
    checkpoint = described(family)
    own = self_kv_layout(checkpoint, DTYPE, 64)
    cross = kv_layout(checkpoint, 0, kv_dtype, "cuda")
    self_pool = PagePool(own, max_batch * own.pages_per_window + 1, "cuda")
    cross_pool = PagePool(cross, max_batch * cross.pages_per_window, "cuda")
    pools = (self_pool.tensor, cross_pool.tensor)
    decoders = load_decoders(checkpoint, choose_attention("auto", *pools), *pools)
    assert decoders.fixed is not None
    tokenizer = WhisperTokenizer.from_checkpoint(checkpoint)
    return ModelRunner(checkpoint, tokenizer, cross_pool, self_pool, max_batch, decoders)


def make_encoder(
    family: str, max_batch: int, kv_dtype: str = DTYPE, *, float8: bool = False
) -> tuple[WindowEncoder, int]:
    """An encoder that has captured its graphs for a pool, and how many it was to capture."""
    checkpoint = described(family)
    layout = kv_layout(checkpoint, 0, kv_dtype, "cuda")
    pool = PagePool(layout, max_batch * layout.pages_per_window, "cuda").tensor
    encoder = WindowEncoder(
        checkpoint, DTYPE, "cuda", contexts=(350, 700), kv_dtype=pool.dtype, float8=float8
    )
    encoder.prepare(pool, max_batch)
    assert encoder._static is not None
    graphs = encoder._static.graphs
    return encoder, len(graphs._sizes) * len(graphs._contexts)
