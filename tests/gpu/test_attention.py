"""On a GPU flashinfer's kernels give what torch gives from the same pages.

Prompts in a graph are compared by whole decoders, in `test_decoder.py`.

Tolerance: 0.02 for outputs of about 1 (bfloat16 has 8 bits, and the kernels round the softmax's
weights to it; float16 would allow a quarter). The reference computes in float32 from the same
rounded values.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.backends import choose_attention
from decoder_worker.gpu.graphs import _capture_graph
from tests.support.checkpoints import SHAPES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]  # the first test compiles the kernels

TOLERANCE = 0.02
N_HEADS = sorted({shape.n_head for shape in SHAPES.values() if shape.d_model // shape.n_head == 64})
N_LAYER = 2
N_TEXT_CTX, N_FRAMES = 448, 1500
SIZES = [(448, 125), (16, 125), (64, 50), (448, 1500)]  # page_tokens, page_frames
DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float8_e4m3fn),
]


class Pools:
    """Pools for `n` sequences with a page to spare, their pages in no order."""

    def __init__(
        self, n: int, n_head: int, sizes: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
    ) -> None:
        self.sizes = sizes
        self.per_own, self.per_cross = -(-N_TEXT_CTX // sizes[0]), N_FRAMES // sizes[1]
        own = torch.randn(n * self.per_own + 1, N_LAYER, 2, sizes[0], n_head, 64, device="cuda")
        cross = torch.randn(n * self.per_cross, N_LAYER, 2, sizes[1], n_head, 64, device="cuda")
        self.own, self.cross = own.to(dtypes[0]), cross.to(dtypes[1])
        order = torch.randperm(n * self.per_own).split(self.per_own)
        self.own_pages = [pages.tolist() for pages in order]
        order = torch.randperm(n * self.per_cross).split(self.per_cross)
        self.cross_pages = [pages.tolist() for pages in order]

    @property
    def scratch(self) -> int:
        return len(self.own) - 1

    def reference(self) -> TorchAttention:
        """Over copies in float32 of all that these pools hold now."""
        return TorchAttention(self.own.float(), self.cross.float())


def assert_close(what: str, ours: Tensor, expected: Tensor) -> None:
    difference = (ours.float() - expected.float()).abs().max().item()
    assert difference <= TOLERANCE, f"{what} differs by {difference}"


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("n_head", N_HEADS)
@torch.inference_mode()
def test_ragged_forwards(
    n_head: int, sizes: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Prompts of any length, with and without history, and beams that share a window."""
    counts, lengths = [4, 1, 227, 1, 1, 16], [4, 300, 227, 17, 17, 448]
    pools = Pools(len(counts), n_head, sizes, dtypes)
    batch = AttentionBatch(
        PagedKV.make(counts, pools.own_pages, lengths, sizes[0]),
        PagedKV.make(
            [4, 1, 227, 2, 16],
            [pages for i, pages in enumerate(pools.cross_pages) if i != 4],
            [N_FRAMES] * 5,
            sizes[1],
        ),
    )
    q, k, v = torch.randn(3, sum(counts), n_head, 64, device="cuda").to(dtypes[0])
    reference = pools.reference()
    ours = choose_attention("flashinfer", pools.own, pools.cross).ragged
    for attention in (reference, ours):
        attention.plan(batch)
    for layer in range(N_LAYER):
        expected = reference.self_attention(layer, q.float(), k.float(), v.float())
        assert_close("self-attention", ours.self_attention(layer, q, k, v), expected)
        expected = reference.cross_attention(layer, q.float())
        assert_close("cross-attention", ours.cross_attention(layer, q), expected)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("n_rows", [1, 4, 64])
@torch.inference_mode()
def test_steps_in_a_graph(
    n_rows: int, sizes: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Captured over inert rows; replayed while rows cross pages, come, go and are missing."""
    n_head = 20
    pools = Pools(n_rows, n_head, sizes, dtypes)
    fixed = choose_attention("flashinfer", pools.own, pools.cross).fixed
    assert fixed is not None
    steps = fixed(n_rows, 1)
    positions = torch.zeros(n_rows, dtype=torch.int64, device="cuda")
    q, k, v = torch.zeros(3, n_rows, n_head, 64, device="cuda", dtype=dtypes[0])
    mixed, looked = torch.zeros(2, N_LAYER, *q.shape, device="cuda", dtype=dtypes[0])

    def body() -> None:
        steps.begin(positions)
        for layer in range(N_LAYER):
            mixed[layer] = steps.self_attention(layer, q, k, v)
            looked[layer] = steps.cross_attention(layer, q)

    def table(ends: list[int | None], full: bool = False) -> AttentionBatch:
        """None: an inert row."""
        own = [
            [pools.scratch] if end is None else pages
            for end, pages in zip(ends, pools.own_pages, strict=True)
        ]
        cross = [
            ([0] * pools.per_cross, N_FRAMES if full else 1) if end is None else (pages, N_FRAMES)
            for end, pages in zip(ends, pools.cross_pages, strict=True)
        ]
        return AttentionBatch(
            PagedKV.make([1] * n_rows, own, [end or 1 for end in ends], sizes[0]),
            PagedKV.make([1] * n_rows, *zip(*cross, strict=True), sizes[1]),
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        steps.plan(table([None] * n_rows, full=True))
        replay = _capture_graph(torch.cuda.graph_pool_handle(), body)
        starts = [(37 * row) % 400 for row in range(n_rows)]
        for step in range(40):
            ends: list[int | None] = [start + step + 1 for start in starts]
            if n_rows > 1 and step < 20:
                ends[1] = None  # it comes later
            if n_rows > 2 and step >= 30:
                ends[2] = None  # it has gone
            batch = table(ends)
            reference = pools.reference()
            reference.plan(batch)
            steps.plan(batch)
            positions.copy_(torch.tensor([(end or 1) - 1 for end in ends]))
            for tensor in (q, k, v):
                tensor.normal_()
            replay()
            live = [row for row, end in enumerate(ends) if end is not None]
            for layer in range(N_LAYER):
                expected = reference.self_attention(layer, q.float(), k.float(), v.float())
                assert_close(f"self-attention, step {step}", mixed[layer][live], expected[live])
                expected = reference.cross_attention(layer, q.float())
                assert_close(f"cross-attention, step {step}", looked[layer], expected)
