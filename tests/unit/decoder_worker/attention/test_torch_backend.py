"""The torch backend: pages as views or gathered, one result whatever the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention

N_HEAD, HEAD_DIM = 2, 8
FRAMES = 60


def make_pools(page_tokens: int, page_frames: int) -> tuple[Tensor, Tensor]:
    """Pools of two layers for three sequences; what was never written is NaN."""
    own = torch.full((3 * 32 // page_tokens, 2, 2, page_tokens, N_HEAD, HEAD_DIM), torch.nan)
    cross = torch.full((3 * FRAMES // page_frames, 2, 2, page_frames, N_HEAD, HEAD_DIM), torch.nan)
    return own, cross


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention, [n, head, head_dim] each; causal where k is as long as q."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    if len(q) == len(k):
        scores = scores.masked_fill(~torch.ones(len(q), len(k)).tril().bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def test_page_tables_follow_their_worked_example() -> None:
    table = PagedKV.make([1, 1], [range(24), (30, 31, 32)], [1500, 70], 64)
    assert table.kv_indptr.tolist() == [0, 24, 26]
    assert table.kv_indices.tolist() == [*range(24), 30, 31]
    assert table.kv_last_page_len.tolist() == [28, 6]
    assert table.qo_indptr.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("page_tokens", "page_frames"), [(32, 60), (8, 20), (4, 60)])
def test_equals_plain_attention_step_by_step(page_tokens: int, page_frames: int) -> None:
    """Sequences of unlike progress in one batch; unwritten memory never reaches a result."""
    own, cross = make_pools(page_tokens, page_frames)
    per_own, per_cross = 32 // page_tokens, FRAMES // page_frames
    order = torch.randperm(len(own), generator=torch.Generator().manual_seed(0)).tolist()
    own_pages = [order[i * per_own : (i + 1) * per_own] for i in range(3)]
    cross_pages = [list(range(i * per_cross, (i + 1) * per_cross))[::-1] for i in range(3)]
    window = torch.randn(3, 2, FRAMES, N_HEAD, HEAD_DIM)
    for i, pages in enumerate(cross_pages):
        for page, part in zip(pages, window[i].split(page_frames, dim=1), strict=True):
            cross[page, 1] = part
    attention = TorchAttention(own, cross)
    history = [torch.zeros(2, 0, N_HEAD, HEAD_DIM) for _ in range(3)]
    for counts in ((5, 1, 12), (1, 1, 1), (1, 7, 1), (3, 1, 2)):
        lengths = [h.shape[1] + n for h, n in zip(history, counts, strict=True)]
        attention.plan(
            AttentionBatch(
                PagedKV.make(counts, own_pages, lengths, page_tokens),
                PagedKV.make(counts, cross_pages, [FRAMES] * 3, page_frames),
            )
        )
        q, k, v = torch.randn(3, sum(counts), N_HEAD, HEAD_DIM)
        got = attention.self_attention(1, q, k, v).split(counts)
        looked = attention.cross_attention(1, q).split(counts)
        parts = zip(q.split(counts), k.split(counts), v.split(counts), strict=True)
        for i, (q_own, k_own, v_own) in enumerate(parts):
            before = history[i].shape[1]
            history[i] = torch.cat([history[i], torch.stack((k_own, v_own))], dim=1)
            queries = torch.cat([q_own.new_zeros(before, N_HEAD, HEAD_DIM), q_own])
            expected = plain(queries, *history[i])[before:]
            torch.testing.assert_close(got[i], expected, atol=1e-5, rtol=1e-5)
            every = torch.cat([plain(row[None], *window[i]) for row in q_own])
            torch.testing.assert_close(looked[i], every, atol=1e-5, rtol=1e-5)


def test_a_sequence_is_the_same_in_any_batch_to_the_bit() -> None:
    own, cross = make_pools(32, 60)
    cross.normal_()
    q, k, v = torch.randn(3, 3, N_HEAD, HEAD_DIM)

    def run(rows: list[int]) -> tuple[Tensor, Tensor]:
        attention = TorchAttention(own.clone(), cross)
        pages = [[row] for row in rows]
        table = PagedKV.make([1] * len(rows), pages, [1] * len(rows), 32)
        whole = PagedKV.make([1] * len(rows), pages, [FRAMES] * len(rows), 60)
        attention.plan(AttentionBatch(table, whole))
        mixed = attention.self_attention(0, q[rows], k[rows], v[rows])
        return mixed, attention.cross_attention(0, q[rows])

    together = run([0, 1, 2])
    for rows in ([1], [2, 0]):
        for alone, batch in zip(run(rows), together, strict=True):
            assert torch.equal(alone, batch[rows])
