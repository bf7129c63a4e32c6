"""The way that a GPU's graphs take, run eagerly on the CPU, equals the plain way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cluster.common.kernels.gpu.operators import NO_PAGE, TRITON, scatter_pages
from cluster.common.kv.connect import kv_layout, states_layout
from cluster.common.kv.cross_kv import CrossKVProjection, Unprojected, as_kv_pool
from cluster.common.messages import FileMel
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from encoder_worker.forward import WindowEncoder
from encoder_worker.gpu.staging import Staging
from encoder_worker.gpu.static_encoder import ATTENTION, StaticEncoder, sizes_up_to
from encoder_worker.mel import N_MARKS, ROW_SAMPLES, FixedLogMel, LogMel
from encoder_worker.model import AudioEncoder, attention
from tests.support.checkpoints import cached_checkpoint
from tests.support.gpu.triton_kernels import compiled, load_kernel
from tests.support.references.hugging_face import make_pcm

UNTOUCHED = -7.0
WINDOWS = [make_pcm(seconds, seed) for seed, seconds in enumerate((0.0001, 4.9973, 29.995, 30.0))]
WINDOWS += [np.zeros(8_000, np.int16)]
SLICES = [None] * len(WINDOWS)
# With context on both sides; a file's last window, shorter than its frames say; the shortest.
SLICED = [make_pcm(30.04, 7), make_pcm(2.0, 8), make_pcm(0.03, 9)]
FILE_MELS = [FileMel(320, 3000, 1.5), FileMel(160, 250, 2.0), FileMel(0, 1, -3.0)]


def staged_mel(windows: list[Any], file_mels: list[FileMel | None], n_mels: int) -> torch.Tensor:
    """Features by way of the staging's tables, with noise behind each window's samples."""
    staging = Staging(len(windows), 1, torch.device("cpu"))
    staging.inputs.pcm.random_(-32_768, 32_767)
    staging.put(windows, [[0]] * len(windows), file_mels, len(windows))
    assert staging.inputs.pcm.shape == (len(windows), ROW_SAMPLES)
    assert staging.inputs.marks.shape == (len(windows), N_MARKS)
    return FixedLogMel(LogMel(n_mels))(staging.inputs.pcm, staging.inputs.marks)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_the_fixed_shape_gives_the_same_features(n_mels: int) -> None:
    """Whole windows, slices of files, silence, and all of them in one batch."""
    windows, file_mels = WINDOWS + SLICED, SLICES + FILE_MELS
    ours = staged_mel(windows, file_mels, n_mels)
    expected = LogMel(n_mels)(windows, file_mels)
    for row in range(len(windows)):
        largest = (ours[row] - expected[row]).abs().max().item()
        assert largest < 1e-5, f"window {row} differs by {largest}"


@pytest.mark.parametrize("n", [1, 5])
def test_a_batch_lands_in_its_pages_and_its_padding_nowhere(checkpoint: Checkpoint, n: int) -> None:
    layout = kv_layout(checkpoint, 125)
    mel, encoder = LogMel(checkpoint.dims.n_mels), AudioEncoder(checkpoint)
    projection = CrossKVProjection(checkpoint)
    pool = torch.full((8 * 12, *layout.page_shape), UNTOUCHED)
    static = StaticEncoder(mel, encoder, projection, pool, max_batch=8)
    pages = torch.randperm(8 * 12, generator=torch.Generator().manual_seed(n)).view(8, 12).tolist()
    static(WINDOWS, pages[3:8])()  # leaves its rows behind in the static inputs
    pool.fill_(UNTOUCHED)
    windows, file_mels = ([*SLICED, *WINDOWS][:n], [*FILE_MELS, *SLICES][:n])
    static(windows, pages[:n], file_mels)()
    plain = torch.full_like(pool, UNTOUCHED)
    WindowEncoder(checkpoint, "float32", "cpu")(windows, plain, pages[:n], file_mels)()
    largest = (pool - plain).abs().max().item()
    assert largest < 1e-4, f"differs by {largest}"
    assert (pool[[page for own in pages[n:] for page in own]] == UNTOUCHED).all()


def test_states_land_in_their_pages_as_they_are(checkpoint: Checkpoint) -> None:
    mel, encoder = LogMel(checkpoint.dims.n_mels), AudioEncoder(checkpoint)
    pool = torch.full((5, *states_layout(checkpoint).page_shape), UNTOUCHED)
    static = StaticEncoder(mel, encoder, Unprojected(), as_kv_pool(pool), max_batch=4)
    static(WINDOWS[:3], [[4], [0], [2]])()
    with torch.inference_mode():
        expected = encoder(mel(WINDOWS[:3]))
    largest = (pool[[4, 0, 2]] - expected).abs().max().item()
    assert largest < 1e-4, f"differs by {largest}"
    assert (pool[[1, 3]] == UNTOUCHED).all()


def test_every_number_of_windows_has_a_graph_of_its_own() -> None:
    assert sizes_up_to(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(24) == [*range(1, 17), 18, 20, 22, 24]
    assert sizes_up_to(17)[-2:] == [16, 17]


def test_a_batch_is_run_at_its_size_and_with_its_own_context(checkpoint: Checkpoint) -> None:
    """What fills it up is more windows, never more positions, on which texts depend."""
    mel, encoder = LogMel(checkpoint.dims.n_mels), AudioEncoder(checkpoint)
    pool = torch.zeros((1, *kv_layout(checkpoint, 1500).page_shape))
    static = StaticEncoder(mel, encoder, CrossKVProjection(checkpoint), pool, 20, contexts=(350,))
    batches = ((1, 1500), (5, 350), (17, 350), (20, 1500), (3, 600))
    shapes = [static.shape_for(windows, positions) for windows, positions in batches]
    assert shapes == [(1500, 1), (350, 5), (350, 18), (1500, 20), (600, 3)]
    assert len(static.shapes) == 2 * 18


def test_a_shorter_context_takes_the_first_pages_of_each_window(checkpoint: Checkpoint) -> None:
    """And is what the encoder makes of as much of the features; other pages stay."""
    layout = kv_layout(checkpoint, 125)
    mel, encoder = LogMel(checkpoint.dims.n_mels), AudioEncoder(checkpoint)
    projection = CrossKVProjection(checkpoint)
    pool = torch.full((3 * 12, *layout.page_shape), UNTOUCHED)
    static = StaticEncoder(mel, encoder, projection, pool, max_batch=4, contexts=(375,))
    pages = torch.randperm(3 * 12, generator=torch.Generator().manual_seed(0)).view(3, 12).tolist()
    static(WINDOWS[:3], pages, context=375)()
    plain = torch.full_like(pool, UNTOUCHED)
    with torch.inference_mode():
        states = encoder(mel(WINDOWS[:3])[:, :, :750])
        projection.write(states, plain, [own[:3] for own in pages])
    largest = (pool - plain).abs().max().item()
    assert largest < 1e-4, f"differs by {largest}"
    assert (pool[[page for own in pages for page in own[3:]]] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("dtype", "page_frames"),
    [(torch.bfloat16, 125), (torch.bfloat16, 1500), (torch.float8_e4m3fn, 125)],
)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernel_compiles_for_hopper_with_wide_accesses(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, page_frames: int
) -> None:
    """Interpreted it may use what a compiler refuses; and an element at a time would be slow."""
    module = load_kernel(monkeypatch, TRITON, interpreted=False)
    kv = torch.empty(2, 1500, 32, 2, 20, 64, dtype=torch.bfloat16, device="meta")
    pool = torch.empty(24, 32, 2, page_frames, 20, 64, dtype=dtype, device="meta")
    table = torch.empty(2, 1500 // page_frames, dtype=torch.int32, device="meta")
    ptx = compiled(module.launch_scatter, "scatter", 90, kv, pool, table)["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16])
def test_the_kernel_equals_torch(monkeypatch: pytest.MonkeyPatch, pool_dtype: torch.dtype) -> None:
    """37 frames in pages of 8: the fifth page gets 5; a window of no pages writes nothing."""
    kv = torch.randn(3, 37, 2, 2, 3, 8)
    table = torch.tensor([[4, 9, 0, 2, 7], [NO_PAGE] * 5, [1, 3, 5, NO_PAGE, 8]], dtype=torch.int32)
    ours = torch.full((11, 2, 2, 8, 3, 8), UNTOUCHED, dtype=pool_dtype)
    expected = ours.clone()
    load_kernel(monkeypatch, TRITON, interpreted=True).launch_scatter(kv, ours, table)
    scatter_pages(kv, expected, table)
    assert torch.equal(ours, expected)
    assert (ours[[6, 10]] == UNTOUCHED).all()
    assert (ours[7, :, :, 5:] == UNTOUCHED).all()


@pytest.fixture
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN computes convolutions in TF32 where nobody forbids it: errors up to 7e-3 of KV."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_convolutions")
@pytest.mark.parametrize("n", [1, 3, 5, 16])
def test_graphs_on_a_gpu_equal_the_cpu(checkpoint: Checkpoint, n: int) -> None:
    layout = kv_layout(checkpoint, 125)
    on_cpu = WindowEncoder(checkpoint, "float32", "cpu")
    on_gpu = WindowEncoder(checkpoint, "float32", "cuda")
    pool = torch.full((17 * 12, *layout.page_shape), UNTOUCHED)
    gpu_pool = pool.cuda()
    on_gpu.prepare(gpu_pool, 16)
    gpu_pool.fill_(UNTOUCHED)  # whatever the capture wrote
    static = on_gpu._static
    assert static is not None
    assert sorted(shape.windows for shape in static.graphs) == list(range(1, 17))
    windows = [make_pcm(0.5 + 1.7 * i, seed=i) for i in range(n)]
    file_mels = [FileMel(0, 100, 1.0) if i % 3 == 2 else None for i in range(n)]
    pages = torch.randperm(16 * 12).view(16, 12).tolist()[:n]
    on_cpu(windows, pool, pages, file_mels)()
    on_gpu(windows, gpu_pool, pages, file_mels)()
    once = gpu_pool.cpu()
    largest = (once - pool).abs().max().item()
    assert largest < 2e-3, f"differs by {largest}"
    on_gpu(windows, gpu_pool, pages, file_mels)()
    assert torch.equal(gpu_pool.cpu(), once)
    assert math.isfinite(once.sum().item())


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_convolutions")
def test_a_gpu_writes_states_by_its_graphs(checkpoint: Checkpoint) -> None:
    on_cpu, on_gpu = (
        WindowEncoder(checkpoint, "float32", device, payload="encoder_states")
        for device in ("cpu", "cuda")
    )
    pool = torch.full((4, *states_layout(checkpoint).page_shape), UNTOUCHED)
    gpu_pool = pool.cuda()
    on_gpu.prepare(gpu_pool, 4)
    gpu_pool.fill_(UNTOUCHED)
    pages = [[2], [0], [3]]
    for _ in range(2):
        on_cpu(WINDOWS[:3], pool, pages)()
        on_gpu(WINDOWS[:3], gpu_pool, pages)()
        largest = (gpu_pool.cpu() - pool).abs().max().item()
        assert largest < 2e-3, f"differs by {largest}"


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("page_frames", [125, 1500])
@pytest.mark.parametrize("shape", ["base", "large-v3"])
def test_a_bfloat16_graph_follows_float32_on_the_cpu(shape: str, page_frames: int, n: int) -> None:
    """With heads of 64, whose attention is fused; a second replay gives the same bits.

    An emulation of it on the CPU was off by 0.8 % of the KV's size in the mean, by 0.05 at most.
    """
    checkpoint = open_checkpoint(str(cached_checkpoint(shape)))
    layout = kv_layout(checkpoint, page_frames)
    n_pages = layout.pages_per_window
    pool = torch.zeros(5 * n_pages, *layout.page_shape)
    gpu_pool = pool.bfloat16().cuda()
    windows = [make_pcm(1.0 + 5 * i, seed=i) for i in range(n)]
    pages = torch.randperm(5 * n_pages).view(5, n_pages).tolist()[:n]
    WindowEncoder(checkpoint, "float32", "cpu")(windows, pool, pages)()
    on_gpu = WindowEncoder(checkpoint, "bfloat16", "cuda", contexts=(320,))
    on_gpu.prepare(gpu_pool, 5)
    assert on_gpu._static is not None
    assert len(on_gpu._static.graphs) == 10
    gpu_pool.zero_()  # whatever the capture wrote
    on_gpu(windows, gpu_pool, pages)()
    once = gpu_pool.cpu()
    gap = once.float() - pool
    relative = (gap.square().mean() / pool.square().mean()).sqrt().item()
    assert relative < 0.02, f"off by {relative} of the KV's size"
    assert gap.abs().max() < 0.2
    on_gpu(windows, gpu_pool, pages)()
    assert torch.equal(gpu_pool.cpu(), once)


@pytest.mark.gpu
@pytest.mark.parametrize("positions", [1500, 320])
@pytest.mark.parametrize("backend", ATTENTION[:2])
def test_fused_attention_equals_the_plain_sums(backend: Any, positions: int) -> None:
    """cuDNN's and FlashAttention's, over the strides that a layer hands over; bfloat16 of 1."""
    qkv = torch.randn(3, positions, 3 * 20 * 64, device="cuda").bfloat16()
    with sdpa_kernel(backend):
        found = attention(qkv, 20)
    with sdpa_kernel(SDPBackend.MATH):
        expected = attention(qkv.float(), 20)
    assert found.is_contiguous()
    largest = (found.float() - expected).abs().max().item()
    assert largest < 0.02, f"differs by {largest}"


@pytest.mark.gpu
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_frames", [1500, 125, 50])
def test_the_kernel_on_a_gpu_equals_torch(page_frames: int, pool_dtype: torch.dtype) -> None:
    kv = torch.randn(3, 1500, 4, 2, 20, 64, device="cuda", dtype=torch.bfloat16)
    kv[0, 7] = 1_000.0  # beyond what 8 bits hold
    n_pages = 1500 // page_frames
    table = torch.randperm(4 * n_pages, dtype=torch.int32).view(4, n_pages)[:3]
    table[1] = NO_PAGE
    ours = torch.full((4 * n_pages, 4, 2, page_frames, 20, 64), UNTOUCHED).to(pool_dtype)
    expected, on_gpu = ours.clone(), ours.cuda()
    scatter_pages(kv, on_gpu, table.cuda())
    scatter_pages(kv.cpu(), expected, table)
    assert torch.equal(on_gpu.cpu().float(), expected.float())
