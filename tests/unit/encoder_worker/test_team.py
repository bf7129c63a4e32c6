"""The encoder that a team of threads computes gives what the plain one gives, by whomever."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.kernels.cpu.tile_registers import (
    HEAD_DIM,
    VECTORS,
    has_bfloat16_tiles,
    products_for,
)
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.model.encoder_context import FULL
from cluster.common.priorities import PASSED_BY
from encoder_worker.cpu.products import (
    TileAttention,
    TorchAttention,
    VectorAttention,
    make_attention,
)
from encoder_worker.cpu.team import TeamEncoder, team_kernels
from encoder_worker.cpu.team_kernels import TeamKernels, build
from encoder_worker.forward import WindowEncoder
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder
from tests.support.checkpoints import cached_checkpoint
from tests.support.references.hugging_face import assert_close, make_pcm
from tests.support.workers.encoder_engines import encode_by

PATIENCE_S = 60.0
# Slow on CPUs that compute bfloat16 by conversions.
FLOAT32_FIRST = pytest.mark.parametrize(
    "kernels",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=str,
    indirect=True,
)
PCM = [make_pcm(seconds, seed) for seed, seconds in enumerate((4.0, 30.0, 0.3))]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(str(cached_checkpoint("tiny")))


# On CPUs without instructions for it bfloat16 takes minutes here.
NATIVE = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU with AVX512"
)


@pytest.fixture(
    scope="module",
    params=[torch.float32, pytest.param(torch.bfloat16, marks=NATIVE)],
    ids=str,
)
def kernels(request: pytest.FixtureRequest) -> TeamKernels:
    return kernels_of(request.param)


def kernels_of(dtype: torch.dtype) -> TeamKernels:
    built = team_kernels(dtype)
    assert built is not None
    return built


def encode(encoder: AudioEncoder, team: TeamEncoder, mel: Tensor) -> Tensor:
    return encode_by(team, mel, encoder.dims.n_audio_state)


@FLOAT32_FIRST
@torch.inference_mode()
def test_any_team_gives_the_plain_encoders_states(
    checkpoint: Checkpoint, kernels: TeamKernels, request: pytest.FixtureRequest
) -> None:
    """In memory that longer windows used, too, and the same whatever the number of threads."""
    dtype = request.node.callspec.params["kernels"]
    encoder, reference = AudioEncoder(checkpoint, dtype), AudioEncoder(checkpoint)
    teams = [TeamEncoder(encoder, kernels, n_threads) for n_threads in (1, 2, 7)]
    for n_positions in (320, 1500, 128):
        mel = LogMel(checkpoint.dims.n_mels)(PCM)[:, :, : 2 * n_positions]
        found, *others = (encode(encoder, team, mel) for team in teams)
        share = 1e-4 if dtype is torch.float32 else 0.05
        assert_close(f"{n_positions} positions", found, reference(mel), share=share)
        assert all(torch.equal(other, found) for other in others), "more threads, another result"
        alone = encode(encoder, teams[1], mel[1:2])
        assert torch.equal(alone[0], found[1]), "another batch, another result"
    for team in teams:
        team.close()


@torch.inference_mode()
def test_a_thread_that_fails_ends_the_window_and_nothing_else(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = AudioEncoder(checkpoint)
    calls, layers = itertools.count(), itertools.count()

    def lay_out(*_: Any) -> None:
        if next(layers) == checkpoint.dims.n_audio_layer + 1:  # within the second window
            raise MemoryError

    monkeypatch.setattr(TorchAttention, "lay_out", lay_out)
    team = TeamEncoder(encoder, build(np.float32), 3)
    mel = LogMel(checkpoint.dims.n_mels)(PCM[:1])
    before = encode(encoder, team, mel)
    with pytest.raises(MemoryError):  # between two layers
        encode(encoder, team, mel)

    def sink(rows: Tensor, begin: int) -> None:
        if next(calls) == 1:
            raise ValueError("no room for these rows")

    with pytest.raises(ValueError, match="no room"):
        team.submit(mel, sink).result(PATIENCE_S)
    with pytest.raises(RuntimeError, match=r"primitive|shape|size"):  # in units before any layer
        team.submit(torch.zeros(1, 3, 5), sink).result(PATIENCE_S)
    assert torch.equal(encode(encoder, team, mel), before)
    team.close()


@torch.inference_mode()
def test_urgent_windows_go_first_and_the_others_are_not_passed_by_for_ever(
    checkpoint: Checkpoint,
) -> None:
    team = TeamEncoder(AudioEncoder(checkpoint), build(np.float32), 1)
    mel = LogMel(checkpoint.dims.n_mels)(PCM[:1])
    held, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def submit(name: str, *, is_urgent: bool) -> Future[None]:
        def sink(rows: Tensor, begin: int) -> None:
            if name == "first":
                held.set()
                assert go_on.wait(PATIENCE_S)

        future = team.submit(mel, sink, is_urgent=is_urgent)
        future.add_done_callback(lambda _: order.append(name))
        return future

    futures = [submit("first", is_urgent=False)]
    assert held.wait(PATIENCE_S)  # within its last layer: a unit of it is left
    futures.append(submit("second", is_urgent=False))
    n = PASSED_BY["later"]
    futures += [submit(f"urgent {i}", is_urgent=True) for i in range(n + 1)]
    go_on.set()
    for future in futures:
        future.result(PATIENCE_S)
    assert order == [*(f"urgent {i}" for i in range(n)), "first", "second", f"urgent {n}"]
    team.close()


VECTORS_OF_8_BITS = pytest.mark.skipif(
    products_for(bfloat16=False, int8=True) is not VECTORS, reason="needs a CPU with AVX-512 VNNI"
)
TILES = pytest.mark.skipif(not has_bfloat16_tiles(), reason="needs a CPU with AMX's bfloat16")


@TILES
@pytest.mark.parametrize("n", [1500, 130])
@pytest.mark.parametrize("loudness", [1.0, 12.0])
def test_attention_by_tiles_is_as_good_as_torchs(n: int, loudness: float) -> None:
    """Within bfloat16's steps of values of about 1; `loudness` 12 gives scores of hundreds."""
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(6, n, 64, generator=generator) for _ in range(3))
    q, k = q * loudness, k * loudness + 5.0  # keys have an offset, which softmax does not see
    expected = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    theirs = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
    attend = TileAttention(build(np.uint16, tiles=True))
    room = -n % attend.key_multiple
    k, v = F.pad(k, (0, 0, 0, room), value=100.0), F.pad(v, (0, 0, 0, room))
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    ours = attend(q[:, : n // 2].contiguous(), k, v, n)
    assert ours.shape == (n // 2, 6 * 64)

    def off(x: Tensor) -> float:
        rows = expected[: n // 2]
        return float(((x[: n // 2].float() - rows).norm() / rows.norm()).item())

    assert off(ours) < max(0.01, 2.5 * off(theirs)), f"{off(ours)}, torch's own {off(theirs)}"


def attend_by_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of q, k, v [H, n, 64], bfloat16, with n a multiple of what the tiles take."""
    attend = TileAttention(build(np.uint16, tiles=True))
    assert k.shape[1] % attend.key_multiple == 0
    return attend(q, k, v.transpose(1, 2).contiguous().transpose(1, 2), k.shape[1], None)


@TILES
@pytest.mark.parametrize("rise", [40.0, 90.0, 200.0, 3000.0])
def test_scores_may_rise_behind_the_first_keys(rise: float) -> None:
    """By 2 ** 50 to 2 ** 4000: powers that no number holds are taken again, of the highest."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 96, 64, generator=generator) for _ in range(3))
    q[:, :, 0], k[:, :, 0] = 8.0, 0.0
    k[:, 70, 0], k[:, 71, 0] = rise, rise - 1.0
    q[1, 5:40, 0] = 0.0  # some queries do not see it
    q, k, v = (x.bfloat16() for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    torch.testing.assert_close(
        attend_by_tiles(q, k, v).float(), expected.transpose(0, 1).flatten(1), atol=0.02, rtol=0.02
    )


@TILES
def test_attention_to_a_key_of_nan_is_nan() -> None:
    q, k, v = (torch.randn(1, 64, 64).bfloat16() for _ in range(3))
    k[0, 40] = torch.nan
    assert attend_by_tiles(q, k, v).isnan().all()


@NATIVE
def test_bfloat16_attends_by_what_the_cpu_has_and_float32_by_torch() -> None:
    expected: type = TorchAttention
    if (way := products_for(bfloat16=True, int8=True)) is not None:
        expected = VectorAttention if way is VECTORS else TileAttention
    kernels = kernels_of(torch.bfloat16)
    assert isinstance(make_attention(kernels, HEAD_DIM), expected)
    assert isinstance(make_attention(kernels, HEAD_DIM // 2), TorchAttention)
    assert isinstance(make_attention(kernels_of(torch.float32), HEAD_DIM), TorchAttention)


def attention_in_8_bits(dtype: torch.dtype = torch.float32) -> VectorAttention:
    own = np.uint16 if dtype == torch.bfloat16 else np.float32
    return VectorAttention(build(own, int8=True, in_8_bits=True))


@VECTORS_OF_8_BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("loudness", [0.5, 3.0])
def test_attention_in_8_bits_is_near_torchs(dtype: torch.dtype, n: int, loudness: float) -> None:
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(3, n, 64, generator=generator) for _ in range(3))
    q, v = q * loudness, v + 2.0
    k -= k.mean(1, keepdim=True)
    k, v = (F.pad(x, (0, 0, 0, 20), value=100.0) for x in (k, v))  # of positions that are not there
    expected = F.scaled_dot_product_attention(q, k[:, :n], v[:, :n]).transpose(0, 1).flatten(1)
    attend = attention_in_8_bits(dtype)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    laid_out = attend.lay_out(k, v, n)
    ours = attend(q, k, v, n, laid_out)
    assert ours.dtype == dtype
    assert ((ours - expected).norm() / expected.norm()).item() < 0.02
    alone = attend(q[:, -1:].contiguous(), k, v, n, laid_out)
    assert torch.equal(alone[0], ours[-1])


@VECTORS_OF_8_BITS
def test_threads_that_attend_in_8_bits_leave_each_other_alone() -> None:
    """More than the system's allocator has arenas for: memory that was freed is soon another's."""
    generator = torch.Generator().manual_seed(3)
    attend = attention_in_8_bits()
    calls = []
    for n in (30, 300, 700, 1500):
        q, k, v = (torch.randn(2, n, 64, generator=generator) for _ in range(3))
        calls.append((q, k, v, n, attend.lay_out(k, v, n)))
    expected = [attend(*call) for call in calls]

    def is_right(i: int) -> bool:
        return torch.equal(attend(*calls[i % 4]), expected[i % 4])

    with ThreadPoolExecutor(48) as threads:
        assert all(threads.map(is_right, range(1000)))


@VECTORS_OF_8_BITS
def test_attention_in_8_bits_to_a_position_of_nan_is_nan() -> None:
    q, k, v = (torch.randn(1, 70, 64) for _ in range(3))
    for each in (q, k, v):
        each[0, 40] = torch.nan
    attend = attention_in_8_bits()
    assert attend(q, k, v, 70, attend.lay_out(k, v, 70)).isnan().all()


def test_rows_of_nan_stay_nan() -> None:
    """A window that the model cannot compute must not look well."""
    kernels = build(np.float32)
    x, plain = np.full((2, 8), np.nan, np.float32), np.ones(8, np.float32)
    out = np.zeros((2, 8), np.float32)
    kernels.add_norm(x, np.zeros((2, 8), np.float32), plain, plain, out)
    assert np.isnan(out).all()


@pytest.fixture
def forward(checkpoint: Checkpoint) -> Iterator[WindowEncoder]:
    made = WindowEncoder(checkpoint, "float32", "cpu")
    yield made
    made.close()


@pytest.mark.parametrize("context", [FULL, 320])
@pytest.mark.parametrize("page_frames", [1500, 125])
def test_pages_get_the_same_with_kernels_and_without(
    checkpoint: Checkpoint, forward: WindowEncoder, page_frames: int, context: int
) -> None:
    dims = checkpoint.dims
    per_window = -(-(context or 1500) // page_frames)
    shape = (3 * per_window, dims.n_text_layer, 2, page_frames, dims.n_text_head, 64)
    pages = torch.randperm(shape[0]).view(3, per_window).tolist()
    plain, by_team = torch.zeros(shape), torch.zeros(shape)
    kernels, forward._kernels = forward._kernels, None
    assert kernels is not None
    forward(PCM, plain, pages, None, context)()
    forward._kernels = kernels
    forward(PCM, by_team, pages, None, context)()
    assert_close("pages", by_team, plain)
    if context and page_frames == 1500:  # packed in the pages' beginnings, and nothing behind
        n_written = plain[0].numel() * context // 1500
        assert plain.flatten(1)[:, :n_written].count_nonzero() > 0.99 * 3 * n_written
        assert not plain.flatten(1)[:, n_written:].any()
        assert not by_team.flatten(1)[:, n_written:].any()
