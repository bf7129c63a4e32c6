"""How many kernels a GPU is given, and what they move, counted without one.

The served code runs on meta tensors, which have shapes and no memory, and every operation that
torch's dispatcher sees is counted: its kernels by the table below, its bytes by the tensors that it
reads and writes. What a library does inside of a call nobody sees from here, so `KERNELS` says what
is assumed of it; the rest is one kernel an operation, and none for a view or for new memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.gpu.product import outer_block

MULTIPROCESSORS = 132
ATTENTION_CTAS = 6 * MULTIPROCESSORS  # of flashinfer's decode kernel at once: fewer are split up

# Kernels of one call where they are not one. Read in the sources of torch 2.13 and of flashinfer
# 0.7.2, not seen on a GPU.
KERNELS = {
    "logsumexp": 9,  # amax, abs, eq, masked_fill, sub, exp, sum, log, add
    "masked_fill": 2,  # a copy, and the fill
    "convolution": 2,  # cuDNN's, and the bias
}
LIBRARY_PRODUCTS = ("mm", "addmm", "linear")
SPLIT_ROWS = 64  # cuBLAS splits a product of so few rows, and adds the parts up by one more kernel,
SPLIT_OUTPUTS = 1280  # where the outputs alone do not occupy the device


@dataclass
class Work:
    """What was launched: kernels by name, bytes to and from memory, operations of products."""

    kernels: Counter[str] = field(default_factory=Counter)
    n_bytes: float = 0.0
    flops: float = 0.0
    # (bytes, bytes from the cache alone, operations) of each launch, in order
    launches: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def n_kernels(self) -> int:
        return sum(self.kernels.values())

    def add(
        self, name: str, n_kernels: int, n_bytes: float, flops: float = 0.0, cached: float = 0.0
    ) -> None:
        self.kernels[name] += n_kernels
        self.n_bytes += n_bytes
        self.flops += flops
        # What a call moves is put to its first kernel; the others add up or fill something small.
        self.launches += [(n_bytes, cached, flops)] + [(0.0, 0.0, 0.0)] * (n_kernels - 1)


class Counting(TorchDispatchMode):
    """Counts in `work` what runs under it."""

    def __init__(
        self, context: int = 0, self_context: int = 0, splits_products: bool = True
    ) -> None:
        """Positions of cross-attention and of self-attention that each row sees."""
        super().__init__()
        self.work = Work()
        self._contexts = (self_context, context)
        self._n_attended = 0
        self._splits = splits_products

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name == "attend_pages":
            self._count_attention(args[0])
        elif not _is_free(func, name, args, out):
            everything = [*_tensors(args), *_tensors(tuple((kwargs or {}).values()))]
            flops, rows, outputs = _product(name, args)
            n_kernels = KERNELS.get(name, 1)
            if flops and self._splits and rows <= SPLIT_ROWS and outputs <= SPLIT_OUTPUTS:
                n_kernels += name in LIBRARY_PRODUCTS
            n_bytes = _moved(name, func, args, everything, _tensors((out,)))
            self.work.add(name, n_kernels, n_bytes, flops, _reread(name, args))
        return out

    def _count_attention(self, q: Tensor) -> None:
        """Self-attention and cross-attention take turns."""
        context = self._contexts[self._n_attended % 2]
        self._n_attended += 1
        n_rows, n_head, head_dim = q.shape
        merged = n_rows * n_head < ATTENTION_CTAS
        kv = 2 * n_rows * context * n_head * head_dim * q.itemsize
        self.work.add("attention", 1 + merged, kv + 2 * _size(q), 2.0 * kv)


class FusedAttention(TorchFunctionMode):
    """Counts torch's attention as the one kernel that it is on a GPU; meta tensors would show the
    operations that a device without one takes."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args  # each [B, head, T, head_dim]
        flops = 4.0 * prod(q.shape) * k.shape[2]
        self._work.add("attention", 1, sum(map(_size, (q, q, k, v))), flops)
        return q.new_empty(q.transpose(1, 2).shape).transpose(
            1, 2
        )  # as flash attention lays it out


def count(run: Callable[[], Any], **contexts: Any) -> Work:
    """What `run` launches on meta tensors; contexts as in `Counting`."""
    counting = Counting(**contexts)
    with torch.inference_mode(), counting, FusedAttention(counting.work):
        run()
    return counting.work


def _is_free(func: Any, name: str, args: tuple[Any, ...], out: Any) -> bool:
    """Views and new memory. What may be a view or a copy is told by its memory."""
    if name.startswith(("empty", "new_empty")):
        return True
    returns = func._schema.returns
    if not returns or any(not r.alias_info or r.alias_info.is_write for r in returns):
        return False
    made, given = _tensors((out,)), _tensors(args[:1])
    return all(_memory(tensor) == _memory(given[0]) for tensor in made)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _product(name: str, args: tuple[Any, ...]) -> tuple[float, int, int]:
    """Operations, rows and outputs of a product; zeros for anything else."""
    if name in ("mm", "addmm", "_addmm_activation"):
        a, b = args[-2:] if name == "addmm" else args[:2]
        if name == "_addmm_activation":
            a, b = args[1:3]
        return 2.0 * a.shape[0] * a.shape[1] * b.shape[1], a.shape[0], b.shape[1]
    if name == "scaled_product":  # 8 bits are multiplied twice as fast: as half as many
        return prod(args[0].shape) * len(args[2]), len(args[0]), len(args[2])
    if name in ("few_rows", "linear"):
        return 2.0 * prod(args[0].shape) * len(args[1]), prod(args[0].shape[:-1]), len(args[1])
    if name == "convolution":
        x, weight, stride = args[0], args[1], args[3][0]
        return 2.0 * prod(weight.shape) * x.shape[0] * x.shape[2] / stride, x.shape[2], len(weight)
    return 0.0, 0, 0


def _reread(name: str, args: tuple[Any, ...]) -> float:
    """Bytes that a product of few rows takes from the cache: every program reads all rows."""
    if name != "few_rows":
        return 0.0
    n_out = len(args[1])
    return float(_size(args[0]) * -(-n_out // outer_block(n_out)))


def _moved(
    name: str, func: Any, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]
) -> float:
    """Bytes read and written: a lookup reads what it finds, anything else all of its tensors."""
    if name in ("index", "gather", "index_select", "embedding"):
        return 2.0 * sum(map(_size, outputs))
    if name == "embed":
        return 3.0 * _size(inputs[-1])
    if name in ("index_put_", "index_copy_"):
        return 2.0 * _size(inputs[-1])
    if name == "append_qkv":
        return 2.0 * _size(inputs[0])
    if name == "append_to_pages":
        return 4.0 * _size(inputs[0])
    if name == "scatter_pages":
        return 2.0 * _size(inputs[0])
    if name in ("few_rows", "scale_rows"):  # writes without reading, but for a sum
        return float(sum(map(_size, inputs)) + (_size(inputs[-1]) if args[-2] is True else 0))
    if name == "add_norm":  # the stream is written where something is added
        return float(sum(map(_size, inputs)) + (_size(inputs[0]) if args[1] is not None else 0))
    written = [tensor for tensor in outputs if all(tensor is not one for one in inputs)]
    marked = zip(func._schema.arguments, args, strict=False)
    in_place = sum(map(_size, _tensors(tuple(v for argument, v in marked if argument.is_write))))
    return float(sum(map(_size, inputs)) + sum(map(_size, written)) + in_place)


def _size(tensor: Tensor) -> int:
    """Bytes, each element of an expanded tensor once."""
    kept = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(kept) * tensor.itemsize


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(tuple(value))
    return found
