"""What is wrong beyond rounding, or raises, is turned off at start with one warning, and told.

By the product's own look, on a CPU: operators by their plain twins, made wrong on purpose.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cluster.cli import check
from cluster.common.errors import ConfigurationError
from cluster.common.kernels.gpu import operators
from cluster.common.kernels.gpu.kernels import has_triton
from cluster.common.kernels.gpu.self_check import (
    FLASHINFER,
    GRAPHS,
    KERNELS,
    TORCH,
    is_right,
    turned_off,
)
from cluster.common.messages import WorkerLoad
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.layers import Linear
from cluster.common.model.layers import as_it_is as as_loaded
from cluster.serve import in_process
from decoder_worker import backends
from decoder_worker.attention import operators as attention
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.backends import Attentions, Decoders, choose_sampler, fastest
from decoder_worker.gpu import fixed_sizes, greedy
from decoder_worker.gpu.decoder import GpuDecoder
from decoder_worker.gpu.greedy import GpuSampler
from decoder_worker.model import DecoderTensors, TorchDecoder
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import TorchSampler
from decoder_worker.sampling.slots import SlotTable
from decoder_worker.stats import DecoderStats
from encoder_worker.gpu import encoder as gpu_encoder
from encoder_worker.gpu.encoder import GpuEncoder
from encoder_worker.model import AudioEncoder
from tests.support.checkpoints import cached_checkpoint
from tests.support.gpu import fake_flashinfer as fake
from tests.support.workers import model_runners
from tests.support.workers.decoder_engines import bucketed_attention
from tests.support.workers.model_runners import RunnerBench
from tests.support.workers.slot_states import make_tokenizer

Operator = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_turned_off() -> Iterator[None]:
    with (
        patch.dict(turned_off, clear=True),
        patch("encoder_worker.model.packer", lambda *args, **flags: as_loaded),
        patch("decoder_worker.model.packer", lambda *args, **flags: as_loaded),
    ):
        yield


def off_by(share: float, operator: Operator, out: int = -1) -> Operator:
    """An operator that leaves a part of its result out: `out` says which argument that is."""

    def wrong(*args: Any) -> Any:
        made = operator(*args)
        given = args[out] if made is None else made
        given.copy_((given.float() * (1 - share)).to(given.dtype))
        return made

    return wrong


def spoiled(operator: Operator, spoil: Callable[[Any], Any]) -> Operator:
    """An operator whose second call, after that on the CPU, has its operands spoiled."""
    calls = []

    def wrong(*args: Any) -> None:
        operator(*args)
        calls.append(args)
        if len(calls) == 2:
            spoil(args)

    return wrong


def raising(*args: Any) -> None:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


# ---- The encoder's layers.


def make_encoder() -> Any:
    checkpoint = open_checkpoint(str(cached_checkpoint()))
    encoder = AudioEncoder(checkpoint, torch.bfloat16)
    encoder.positions = encoder.positions[:200]  # a short window is as good
    return gpu_encoder.fastest(encoder)


def test_what_is_right_is_used() -> None:
    assert isinstance(make_encoder(), GpuEncoder)
    assert not turned_off


def test_wrong_kernels_become_torchs_layers(caplog: pytest.LogCaptureFixture) -> None:
    with patch.object(operators, "_add_norm", off_by(0.2, operators._add_norm, out=5)):
        made = make_encoder()
    assert isinstance(made, AudioEncoder)
    assert made.layers
    assert list(turned_off) == [KERNELS]
    assert len(caplog.messages) == 1
    assert not has_triton(), "what else would run by our kernels"


def test_products_of_torch_that_are_wrong_end_the_start() -> None:
    """As bfloat16 ones at some numbers of multiprocessors, off by 0.92: nothing plainer is left."""
    right = Linear.__call__

    def wrong(linear: Linear, x: Tensor) -> Tensor:
        return right(linear, x) * (0.08 if x.dtype == torch.bfloat16 else 1.0)

    with (
        patch.object(Linear, "__call__", wrong),
        pytest.raises(ConfigurationError, match=r"torch.bfloat16 are wrong.*dtype to float32"),
    ):
        make_encoder()
    assert list(turned_off) == [KERNELS, TORCH]


# ---- The decoder's layers, and its attention.


@pytest.fixture
def flashinfer() -> Iterator[ModuleType]:
    with fake.fake_flashinfer() as module:
        yield module


def make_decoders(flashinfer: ModuleType) -> Decoders:
    checkpoint = open_checkpoint(str(cached_checkpoint()))
    dims = checkpoint.dims
    shape, heads = (dims.n_text_layer, 2), (dims.n_text_head, dims.text_head_dim)
    own = torch.full((12, *shape, 16, *heads), torch.nan, dtype=torch.bfloat16)
    cross = torch.full((2, *shape, 50, *heads), torch.nan, dtype=torch.bfloat16)
    kernels = flashinfer.FlashInfer(own, cross)
    ragged = kernels.ragged()
    tensors = DecoderTensors.load(checkpoint, torch.bfloat16, "cpu")
    decoder = TorchDecoder.of(replace(tensors, head=tensors.head.bfloat16()), ragged)
    return fastest(decoder, Attentions(ragged, kernels.fixed, projected=ragged), own, cross)


def test_a_decoder_that_is_right_has_our_kernels(flashinfer: ModuleType) -> None:
    made = make_decoders(flashinfer)
    assert isinstance(made.ragged, GpuDecoder)
    assert made.fixed is not None
    assert len(made.ragged.reference.layers) == len(made.torch.layers) > 1
    with patch.object(backends, "has_triton", lambda: False):
        made = make_decoders(flashinfer)
    assert made.ragged is made.torch
    assert not turned_off


@pytest.mark.parametrize(
    ("module", "name", "out"),
    [
        (operators, "_add_norm", 5),
        (attention, "append_qkv", -1),
    ],
)
def test_a_wrong_kernel_of_the_decoder_becomes_torchs_layers(
    flashinfer: ModuleType, module: ModuleType, name: str, out: int
) -> None:
    wrong = off_by(0.5, getattr(module, name), out)
    with patch.object(module, name, wrong), patch.object(tables(), name, wrong, create=True):
        made = make_decoders(flashinfer)
    assert made.ragged is made.torch
    assert list(turned_off) == [KERNELS]
    assert made.fixed is not None


def tables() -> Any:
    from decoder_worker.attention import flashinfer_tables

    return flashinfer_tables


def test_wrong_attention_becomes_torchs(flashinfer: ModuleType) -> None:
    """Of all kinds, also where only one table's is wrong: here that of steps, which buckets use."""
    run = fake.BatchDecodeWithPagedKVCacheWrapper.run

    def wrong(wrapper: Any, *args: Any, **options: Any) -> Any:
        return run(wrapper, *args, **options).mul_(0.5)

    with patch.object(fake.BatchDecodeWithPagedKVCacheWrapper, "run", wrong):
        made = make_decoders(flashinfer)
    assert isinstance(made.torch.attention, TorchAttention)
    assert made.fixed is None
    assert list(turned_off) == [FLASHINFER]


def test_a_wrong_choice_of_tokens_becomes_torchs() -> None:
    tokenizer = make_tokenizer()
    rules, slots = LogitRules(tokenizer, 50, "cpu"), SlotTable(4, "cpu")
    sampler = GpuSampler(TorchSampler(rules, slots), rules, slots)
    before = slots.table.clone()
    assert sampler.is_right()
    assert torch.equal(slots.table, before)
    wrong = spoiled(greedy.sample_greedy, lambda args: args[-2].add_(1))
    with patch.object(greedy, "sample_greedy", wrong):
        assert not sampler.is_right()
    assert list(turned_off) == [KERNELS]
    assert choose_sampler(rules, slots).__class__ is TorchSampler


# ---- Graphs, and the pages that they write.


def refused(body: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing")


def bucketed(setting: str, own: Tensor, cross: Tensor, threads: int, *, packed: bool) -> Attentions:
    return bucketed_attention(own, cross, packed=packed)


def test_graphs_of_the_decoder_that_cannot_be_captured_become_launches() -> None:
    with (
        patch.object(fixed_sizes, "capture_on", lambda device: refused),
        patch.object(model_runners, "choose_attention", bucketed),
    ):
        fixed = RunnerBench(cached_checkpoint(), 2, "cpu", "float32").runner._fixed
    assert fixed is not None
    assert list(turned_off) == [GRAPHS]
    for buckets in (*fixed._steps.values(), *fixed._prompts.values(), fixed._languages):
        for bucket in buckets._buckets.values():
            assert all(isinstance(replay, partial) for replay in bucket.replays.values())


def test_a_scatter_that_writes_elsewhere_is_found() -> None:
    pool = torch.zeros(6, 2, 2, 10, 2, 8)
    assert operators.scatters(pool)
    assert operators.scatters(pool.to(torch.float8_e4m3fn))
    wrong = spoiled(operators._scatter_pages, lambda args: args[1].copy_(args[1].roll(1, 0)))
    with patch.object(operators, "_scatter_pages", wrong):
        assert not operators.scatters(pool)
    assert list(turned_off) == [KERNELS]


# ---- What is said.


def test_health_says_what_is_turned_off() -> None:
    is_right(GRAPHS, lambda: [torch.tensor([torch.nan])], lambda: [torch.ones(1)])
    assert not is_right(GRAPHS, lambda: [torch.ones(1)], lambda: [torch.ones(1)]), "for good"
    counts = {field.name: 0 for field in fields(DecoderStats)}
    status = DecoderStats(**(counts | {"load": WorkerLoad()})).as_status(
        replica="r", model="m", transport="memory", device="cuda", healthy=True
    )
    assert status.turned_off == {GRAPHS: "it differs by nan of what torch computes"}


@pytest.mark.parametrize("starts", [True, False])
def test_the_command_check_says_what_is_turned_off(
    monkeypatch: pytest.MonkeyPatch, *, starts: bool
) -> None:
    """By the engines themselves, here made up: `splitscribe check` starts both on a GPU."""

    @asynccontextmanager
    async def engines(settings: Any) -> AsyncIterator[None]:
        if not starts:
            raise RuntimeError("no kernel image is available")
        is_right(KERNELS, lambda: [torch.zeros(1)], lambda: [torch.ones(1)])
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(in_process, "local_engines", engines)
    ((what, finding, well),) = check._gpu()
    assert not well
    if starts:
        expected = "torch's layers instead: it differs by 1.000 of what torch computes"
        assert (what, finding) == (KERNELS, expected)
    else:
        assert finding == "RuntimeError: no kernel image is available"
