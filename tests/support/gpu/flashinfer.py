"""flashinfer on a simulated GPU: `fake_flashinfer`'s values, and the traffic of the real one.

A plan is written to a pinned buffer of its wrapper and copied from there in the stream's order, and
each run reads the copy. Nothing in it waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.support.gpu import fake_flashinfer as fake
from tests.support.gpu.device import SimulatedGpu
from tests.support.gpu.tensor import CUDA

PLAN_BYTES = 64


def flashinfer_on(gpu: SimulatedGpu) -> ModuleType:
    """A module with all that the product takes of flashinfer's."""

    def on_gpu(wrapper: Any, sent: Callable[[Any], tuple[Tensor, ...]]) -> Any:
        """The wrapper's class with traffic; `sent` are the buffers that its plan writes."""

        class OnGpu(wrapper):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self._pinned = torch.zeros(PLAN_BYTES, dtype=torch.uint8, pin_memory=True)
                self._int_workspace = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=CUDA)

            def plan(self, *args: Any, **kwargs: Any) -> None:
                if gpu.values == "cpu":
                    with gpu.in_kernel():
                        super().plan(*args, **kwargs)
                self.send()
                if buffers := sent(self):
                    gpu.touch("plan", (), buffers)

            def send(self) -> None:
                self._pinned.fill_(1)
                self._int_workspace.copy_(self._pinned, non_blocking=True)

            def run(self, *args: Any, **kwargs: Any) -> Tensor:
                gpu.touch("run", (self._int_workspace,))
                found: Tensor = super().run(*args, **kwargs)
                return found

        return OnGpu

    decode = on_gpu(
        fake.BatchDecodeWithPagedKVCacheWrapper, lambda own: (own.indptr, own.indices, own.last)
    )
    prefill = on_gpu(fake.BatchPrefillWithPagedKVCacheWrapper, lambda own: tuple(own._buffers))

    def fast_decode_plan(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        if gpu.values == "cpu":
            with gpu.in_kernel():
                fake.fast_decode_plan(wrapper, *args, **kwargs)
        wrapper.send()

    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = prefill  # type: ignore[attr-defined]
    module.fast_decode_plan = fast_decode_plan  # type: ignore[attr-defined]
    module.append_paged_kv_cache = fake.append_paged_kv_cache  # type: ignore[attr-defined]
    return module
