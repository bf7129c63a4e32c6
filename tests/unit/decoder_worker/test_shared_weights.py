"""A large model's weights are held once, and decode as those of torch's own layout do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.common.kernels.cpu.tile_registers import has_bfloat16_tiles
from cluster.common.messages import DecodeOptions
from decoder_worker import backends
from decoder_worker.cpu.fused import FusedDecoder
from decoder_worker.model import TorchDecoder
from tests.support.checkpoints import ModelShape, make_checkpoint
from tests.support.references.hugging_face import assert_close
from tests.support.workers.model_runners import RunnerBench

SHAPE = ModelShape(128, 2, 1, 2, n_vocab=2_000, n_languages=4)
SHARES = {"float32": 1e-5, "bfloat16": 0.02}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), SHAPE)


@pytest.mark.parametrize("dtype", SHARES)
def test_shared_weights_give_the_states_of_packed_ones(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    benches = [RunnerBench(folder, 2, "cpu", dtype)]
    monkeypatch.setattr(backends, "SHARED_FROM_BYTES", 0)
    benches.append(RunnerBench(folder, 2, "cpu", dtype))
    packed, shared = (torch_of(bench) for bench in benches)
    for before, after in zip(packed.layers, shared.layers, strict=True):
        x = torch.randn(9, SHAPE.d_model).to(getattr(torch, dtype))
        for name in ("self_qkv", "self_out", "cross_q", "cross_out"):
            expected = getattr(before, name)(x).float()
            assert_close(name, getattr(after, name)(x).float(), expected, SHARES[dtype])
        assert_close("mlp", after.mlp(x.float()), before.mlp(x.float()), SHARES[dtype])
    logits = [prompt_logprob(bench) for bench in benches]
    assert logits[1] == pytest.approx(logits[0], abs=100 * SHARES[dtype])


def test_torch_reads_the_matrices_of_the_compiled_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "SHARED_FROM_BYTES", 0)
    bench = RunnerBench(folder, 1, "cpu", "bfloat16")
    few, many = compiled_of(bench), bench.decoders.torch
    for index, layer in enumerate(many.layers):
        for held, own in (
            (few._layers.qkv, layer.self_qkv),
            (few._layers.self_out, layer.self_out),
            (few._layers.cross_q, layer.cross_q),
            (few._layers.cross_out, layer.cross_out),
            (few._layers.fc1, layer.mlp.fc1),
            (few._layers.fc2, layer.mlp.fc2),
        ):
            assert own.weight.data_ptr() == held.weight[index].ctypes.data


@pytest.mark.skipif(not has_bfloat16_tiles(), reason="needs a CPU with AMX's bfloat16")
def test_only_weights_that_torch_does_not_read_lie_in_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = RunnerBench(folder, 1, "cpu", "bfloat16")
    monkeypatch.setattr(backends, "SHARED_FROM_BYTES", 0)
    shared = RunnerBench(folder, 1, "cpu", "bfloat16")
    in_blocks, in_rows = (compiled_of(bench)._layers for bench in (own, shared))
    for blocks, rows in zip(in_blocks[:6], in_rows[:6], strict=True):
        n_layer, n_out, n_in = rows.weight.shape
        assert blocks.weight.shape == (n_layer, n_out // 64, n_in // 32, 64, 32)


def compiled_of(bench: RunnerBench) -> FusedDecoder:
    few = bench.decoders.ragged
    assert isinstance(few, FusedDecoder)
    return few


def torch_of(bench: RunnerBench) -> TorchDecoder:
    return bench.decoders.torch


def prompt_logprob(bench: RunnerBench) -> float:
    sequence = bench.sequence(0, DecodeOptions(language="en"))
    ((output,),) = bench.runner.collect(bench.runner.prefill([sequence]))
    return float(output.logprob)
