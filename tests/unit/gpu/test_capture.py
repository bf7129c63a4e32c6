"""What a CUDA graph holds is what a capture takes: nothing that asks the host, nothing that goes.

The captured functions of both roles run as they are on a simulated GPU (`tests/support/gpu`), for
every published size of the model and every size of a batch. Forbidden acts that are put into the
product are refused with their line.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cluster.common.kv.connect import kv_layout
from cluster.common.kv.pool import PagePool
from cluster.common.model import streams
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.streams import (
    new_stream,
    on_stream,
)
from decoder_worker.model_runner import ModelRunner
from decoder_worker.sampling.sampler import TorchSampler
from decoder_worker.step import DecodeStep
from encoder_worker.forward import WindowEncoder
from encoder_worker.mel import FixedLogMel
from tests.support.checkpoints import SHAPES, cached_checkpoint
from tests.support.gpu.capture import CaptureError
from tests.support.gpu.one_gpu import checkpoint_folder, simulated_one_gpu
from tests.support.gpu.runtime import SimulatedRuntime
from tests.support.gpu.tensor import CUDA
from tests.support.workers.model_runners import RunnerBench

PUBLISHED = [family for family in SHAPES if family != "micro"]
DTYPE = "bfloat16"


@contextmanager
def shapes_only() -> Iterator[SimulatedRuntime]:
    """A simulated GPU that computes no values, so that a model of any size costs little."""
    with simulated_one_gpu(values="meta") as (_, runtime), patch.object(streams, "WARM_UPS", 0):
        yield runtime


def make_runner(family: str, max_batch: int, kv_dtype: str = DTYPE) -> ModelRunner:
    """A runner, which has captured its graphs."""
    folder = cached_checkpoint(family)
    return RunnerBench(folder, max_batch, "cuda", DTYPE, kv_dtype=kv_dtype, page_tokens=64).runner


def make_encoder(family: str, max_batch: int, kv_dtype: str = DTYPE) -> tuple[WindowEncoder, int]:
    """An encoder that has captured its graphs for a pool, and how many it was to capture."""
    checkpoint = open_checkpoint(str(cached_checkpoint(family)))
    layout = kv_layout(checkpoint, 0, kv_dtype, "cuda")
    pool = PagePool(layout, max_batch * layout.pages_per_window, "cuda").tensor
    encoder = WindowEncoder(checkpoint, DTYPE, "cuda", contexts=(350, 700), kv_dtype=pool.dtype)
    encoder.prepare(pool, max_batch)
    assert encoder._static is not None
    return encoder, len(encoder._static.shapes)


def check_roles(family: str, max_batch: int, encoder_batch: int, kv_dtype: str = DTYPE) -> None:
    with shapes_only() as runtime:
        runner = make_runner(family, max_batch, kv_dtype)
        n_decoder = len(runtime.graphs)
        encoder, n_encoder = make_encoder(family, encoder_batch, kv_dtype)
        assert n_decoder > 10
        assert len(runtime.graphs) == n_decoder + n_encoder
        gc.collect()  # what only the capture kept alive is gone now
        with on_stream(new_stream(CUDA)):
            for replay in runtime.graphs:
                replay()
        del runner, encoder


def test_a_small_model_is_captured_and_replayed() -> None:
    checkpoint_folder()  # its shape is one of SHAPES from here on
    check_roles("micro-64", 1, 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", PUBLISHED)
def test_every_published_size_is_captured_at_every_batch_and_replayed(family: str) -> None:
    check_roles(family, 32, 16)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_eight_bits_are_captured_and_replayed() -> None:
    check_roles("large-v3-turbo", 4, 4, "float8_e4m3fn")


def ask_for_probabilities(step: DecodeStep, logits: Tensor) -> Tensor:
    return torch.tensor(logits[:, 0].cpu().tolist(), device=logits.device)


def draw_where_warm(sampler: TorchSampler, logits: Tensor, rows: Any, noisy: Tensor) -> Tensor:
    return logits[rows.temperature > 0].argmax(-1)


@pytest.mark.parametrize(
    ("owner", "name", "put_in"),
    [
        (DecodeStep, "no_speech_probs", ask_for_probabilities),
        (TorchSampler, "_draw", draw_where_warm),
    ],
)
def test_a_decoder_that_asks_the_host_in_a_step_is_refused(
    owner: type, name: str, put_in: Any
) -> None:
    checkpoint_folder()
    with (
        shapes_only(),
        patch.object(owner, name, put_in),
        pytest.raises(CaptureError, match=f"{put_in.__name__}"),
    ):
        make_runner("micro-64", 1)


def test_an_encoder_that_asks_the_host_is_refused_and_does_not_run_eagerly() -> None:
    """A capture that fails by a RuntimeError would only be logged."""
    checkpoint_folder()
    take = FixedLogMel.__call__

    def longest(mel: FixedLogMel, pcm: Tensor, marks: Tensor) -> Tensor:
        return take(mel, pcm[:, : int(marks[:, 0].max())], marks)

    with (
        shapes_only(),
        patch.object(FixedLogMel, "__call__", longest),
        pytest.raises(CaptureError, match="in longest: copies from the device to the host"),
    ):
        make_encoder("micro-64", 1)
