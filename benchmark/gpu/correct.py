"""Compare the fast paths of a GPU with plain ones, on a wide, shallow model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmark.gpu.decode import fill_pool, publish, submit
from benchmark.gpu.rig import PAGE_FRAMES, PATIENCE_S, Record, Rig, clip
from cluster.common.kv.connect import kv_layout
from cluster.common.kv.layout import FLOAT8
from cluster.common.messages import DecodeResult
from cluster.common.model.checkpoint import Checkpoint
from encoder_worker.forward import WindowEncoder

KV_ERROR = 0.03  # of the KV's norm, bfloat16 against float32
KV_ERROR_OF_8_BITS = 0.12  # where the KV has 8 bits
LOGPROB_ERROR = 0.15  # of a token, between kernels


def correct(rig: Rig, record: Record) -> None:
    """Compare the fast paths with plain ones; raise RuntimeError where they differ."""
    wrong = _check_decoder(rig, record)
    checkpoint = rig.checkpoint("check")
    for way in WAYS:
        record("wrong", wrong)
        wrong = wrong + _check_encoder(rig, checkpoint, way, record)
    record("wrong", wrong)
    if wrong:
        raise RuntimeError("; ".join(wrong))


@dataclass(frozen=True, slots=True)
class Way:
    """An encoder and its KV. `error` is the largest that passes, relative to the KV's norm."""

    name: str
    kv_dtype: str = ""  # of the pool; empty: the encoder's
    error: float = KV_ERROR


WAYS = (
    Way("encoder"),
    Way("KV in 8 bits", kv_dtype=FLOAT8, error=KV_ERROR_OF_8_BITS),
)


def _check_encoder(rig: Rig, checkpoint: Checkpoint, way: Way, record: Record) -> list[str]:
    """Compare graphs in the served dtype with an eager float32 encoder, in uneven batches."""
    n_pages = 1500 // PAGE_FRAMES
    served = kv_layout(checkpoint, PAGE_FRAMES, way.kv_dtype or rig.dtype)
    exact = kv_layout(checkpoint, PAGE_FRAMES, "float32")
    kv_dtype: torch.dtype = getattr(torch, served.dtype)  # decides how KV is scaled in its pages
    fast = WindowEncoder(checkpoint, rig.dtype, rig.device, kv_dtype=kv_dtype)
    plain = WindowEncoder(checkpoint, "float32", rig.device, kv_dtype=kv_dtype)
    wrong: list[str] = []
    largest = max(rig.sizes.encode_batches)
    pool = torch.zeros((largest * n_pages, *served.page_shape), device=rig.device).to(kv_dtype)
    fast.prepare(pool, largest)
    reference = torch.zeros((largest * n_pages, *exact.page_shape), device=rig.device)
    for n in sorted({1, min(3, largest), min(5, largest), largest}):
        windows = [clip(0.3 + 29.7 * i / max(1, n - 1), i) for i in range(n)]
        order = np.random.default_rng(n).permutation(largest * n_pages).reshape(-1, n_pages)
        pages = order[:n].tolist()
        pool.fill_(float("nan"))
        reference.fill_(float("nan"))
        rig.synchronize()  # encoders write on streams of their own
        fast(windows, pool, pages)()
        plain(windows, reference, pages)()
        own = torch.tensor(order[:n].flatten(), device=rig.device)
        error = _relative(pool[own], reference[own])
        others = torch.tensor(order[n:].flatten(), device=rig.device)
        outside = bool(pool[others].float().isnan().all()) if len(others) else True
        record(f"{way.name}, batch of {n}: relative error", error)
        if not error <= way.error:
            wrong.append(f"{way.name}: the KV of a batch of {n} differs by {error:.3f} of its norm")
        if not outside:
            wrong.append(f"{way.name}: a batch of {n} wrote outside of its pages")
    return wrong


def _check_decoder(rig: Rig, record: Record) -> list[str]:
    """Compare the served attention, in graphs and batches, with torch's, one sequence at a time."""
    n, n_tokens = max(rig.sizes.decode_batches[:4]), 8
    found: dict[str, list[DecodeResult]] = {}
    choices: tuple[Literal["auto", "torch"], ...] = ("auto", "torch")
    for attention in choices:
        with rig.pair("check", max_batch=n, windows=2 * n, attention=attention) as pair:
            fill_pool(pair)
            handles = publish(pair, n)
            together = attention == "auto"
            if together:
                futures = [submit(pair, handle, n_tokens) for handle in handles]
                found[attention] = [future.result(PATIENCE_S) for future in futures]
            else:
                found[attention] = [
                    submit(pair, handle, n_tokens).result(PATIENCE_S) for handle in handles
                ]
    wrong: list[str] = []
    n_equal, largest = 0, 0.0
    for ours, plain in zip(found["auto"], found["torch"], strict=True):
        n_equal += ours.tokens == plain.tokens
        for a, b, p, q in zip(
            ours.tokens, plain.tokens, ours.token_logprobs, plain.token_logprobs, strict=True
        ):
            largest = max(largest, abs(p - q))
            if a != b:  # two tokens were almost equally likely; what follows is another text
                break
    record("decoder: sequences with equal tokens", f"{n_equal} of {n}")
    if rig.dtype == "float32" and n_equal < n:
        wrong.append(f"only {n_equal} of {n} sequences have equal tokens in float32")
    record("decoder: largest difference of a log probability", largest)
    if largest > LOGPROB_ERROR:
        wrong.append(f"log probabilities differ by {largest:.3f} from torch's attention")
    return wrong


def _relative(ours: Tensor, reference: Tensor) -> float:
    ours = ours.float()
    return float((ours - reference).norm() / reference.norm())
