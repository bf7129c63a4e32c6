"""What a CUDA graph holds is what a capture takes: nothing that asks the host, nothing that goes.

The captured functions of both roles run as they are on a simulated GPU (`tests/support/gpu`), for
every published size of the model and every size of a batch. Each forbidden act is put in, once by
itself and once in the product, and is refused with its line.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cluster.common.model.operators import define
from cluster.common.model.streams import (
    capture,
    new_event,
    new_graph_memory,
    new_stream,
    on_stream,
    pinned,
    synchronize,
)
from decoder_worker.sampling.sampler import TorchSampler
from decoder_worker.step import DecodeStep
from encoder_worker.mel import FixedLogMel
from tests.support.checkpoints import SHAPES
from tests.support.gpu.capture import CaptureError
from tests.support.gpu.device import MixedDevicesError
from tests.support.gpu.one_gpu import checkpoint_folder
from tests.support.gpu.runtime import simulated_gpu
from tests.support.gpu.shapes import DTYPE, make_encoder, make_runner, shapes_only
from tests.support.gpu.tensor import CUDA

PUBLISHED = [family for family in SHAPES if family != "micro"]
Body = Callable[[], Any]


def captured(body: Body) -> Callable[[], None]:
    with on_stream(new_stream(CUDA)):
        return capture(body, new_graph_memory())


def check_roles(
    family: str, max_batch: int, encoder_batch: int, kv_dtype: str = DTYPE, *, float8: bool = False
) -> None:
    with shapes_only() as (_, runtime):
        runner = make_runner(family, max_batch, kv_dtype)
        n_decoder = len(runtime.graphs)
        encoder, n_encoder = make_encoder(family, encoder_batch, kv_dtype, float8=float8)
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
@pytest.mark.parametrize(("kv_dtype", "float8"), [("float8_e4m3fn", False), (DTYPE, True)])
def test_eight_bits_are_captured_and_replayed(kv_dtype: str, float8: bool) -> None:
    check_roles("large-v3-turbo", 4, 4, kv_dtype, float8=float8)


x: Any = None  # a tensor of the device, [4, 8], with values


def _to_device() -> None:
    x.copy_(torch.ones(4, 8))


def _from_device() -> None:
    torch.zeros(4, 8).copy_(x, non_blocking=True)


def _mask() -> Tensor:
    return x[x > 0]


def _write_masked() -> None:
    x[x > 0] = torch.ones(1, device=CUDA)


def _truth() -> None:
    if (x > 0).all():
        x.zero_()


def _host_index() -> Tensor:
    return x[torch.tensor([0, 2])]


def _pinned() -> None:
    pinned([1.0], torch.float32)


def _wait() -> None:
    synchronize(CUDA)


def _event() -> None:
    new_event().synchronize()


def _other_stream() -> None:
    with on_stream(new_stream(CUDA)):
        x.zero_()


FORBIDDEN: dict[str, tuple[Body, str]] = {
    "cpu": (lambda: x.cpu(), "from the device to the host"),
    "item": (lambda: x[0, 0].item(), "look at values"),
    "tolist": (lambda: x.tolist(), "from the device to the host"),
    "truth": (_truth, "look at values"),
    "copy_": (_from_device, "from the device to the host"),
    "to device": (_to_device, "from the host to the device"),
    "tensor": (lambda: torch.tensor([1.0], device=CUDA), "from the host to the device"),
    "host index": (_host_index, "from the host to the device"),
    "nonzero": (lambda: x.nonzero(), "shape that depends on values"),
    "where": (lambda: torch.where(x > 0), "shape that depends on values"),
    "mask": (_mask, "shape that depends on values"),
    "write masked": (_write_masked, "shape that depends on values"),
    "repeats": (
        lambda: torch.repeat_interleave(torch.ones(4, dtype=torch.int64, device=CUDA)),
        "shape that depends on values",
    ),
    "pinned": (_pinned, "pinned memory"),
    "synchronize": (_wait, "waits"),
    "event": (_event, "waits"),
    "other stream": (_other_stream, "another stream"),
}


@pytest.mark.parametrize("act", FORBIDDEN)
def test_a_forbidden_act_is_refused_with_its_line(act: str) -> None:
    global x
    body, why = FORBIDDEN[act]
    with simulated_gpu():
        x = torch.ones(4, 8, device=CUDA)
        with pytest.raises(CaptureError, match=why) as refused:
            captured(body)
        x = None
    assert "tests/unit/gpu/test_capture.py:" in str(refused.value)


def test_tensors_of_both_devices_do_not_mix() -> None:
    with simulated_gpu():
        on_device = torch.ones(4, device=CUDA)
        with pytest.raises(MixedDevicesError, match=r"test_capture\.py:"):
            captured(lambda: on_device + torch.ones(4))
        captured(lambda: on_device.mul_(2.0).add_(torch.tensor(1.0)))  # numbers go along


def test_memory_must_not_outlive_the_captured_function() -> None:
    kept: list[Tensor] = []
    with simulated_gpu():
        with pytest.raises(CaptureError, match="outlives"):
            captured(lambda: kept.append(torch.zeros(4, device=CUDA)))
        kept.clear()


def test_memory_that_a_graph_reads_must_stay() -> None:
    """Like a table that is made anew for each plan."""
    with simulated_gpu():
        held = [torch.zeros(4, device=CUDA)]
        buffer = torch.zeros(4, device=CUDA)
        replay = captured(lambda: buffer.copy_(held[0]))
        replay()
        held.clear()
        with pytest.raises(CaptureError, match="that is gone"):
            replay()


def test_a_replay_that_would_do_something_else_is_found() -> None:
    """A graph holds the addresses that it was captured with."""
    with simulated_gpu():
        tensors = {"now": torch.zeros(4, device=CUDA)}
        before = tensors["now"]
        replay = captured(lambda: tensors["now"].add_(1))
        replay()
        tensors["now"] = torch.zeros(4, device=CUDA)
        with pytest.raises(CaptureError, match="is not what was captured"):
            replay()
        del before


def test_an_operator_of_ours_is_seen_by_what_it_declares() -> None:
    """Its kernel may do what it likes; what counts is what it says that it writes."""
    fill = define(
        "fill_for_a_test",
        writes=("target",),
        cuda=lambda x, by: None,
        cpu=_fill,
        shapes=lambda x, by: None,
    )
    with simulated_gpu() as (gpu, _):
        seen = []
        target, by = torch.zeros(2, device=CUDA), torch.ones(3, device=CUDA)
        gpu.watchers.append(seen.append)
        fill(target, by)
        (operation,) = seen
        assert operation.reads == (by,)
        assert operation.writes == (target,)
        assert target.tolist() == [3.0, 3.0]


def _fill(target: Tensor, by: Tensor) -> None:
    target.fill_(by.sum().item())


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
        pytest.raises(CaptureError, match="in longest: asks the host to look at values"),
    ):
        make_encoder("micro-64", 1)
