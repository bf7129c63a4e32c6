"""flashinfer on a simulated GPU: `fake_flashinfer`'s values, and the traffic of the real one.

A plan is written to its wrapper's pinned buffer and copied from there in the stream's order, and
each run reads the copy. Nothing in it waits for the device.
"""

from __future__ import annotations

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
    def on_gpu(wrapper: Any) -> Any:
        class OnGpu(wrapper):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                pinned = torch.zeros(PLAN_BYTES, dtype=torch.uint8, pin_memory=True)
                self._pin_memory_int_workspace_buffer = pinned
                self._int_workspace = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=CUDA)

            def plan(self, *args: Any, **kwargs: Any) -> None:
                if gpu.values == "cpu":
                    with gpu.in_kernel():
                        super().plan(*args, **kwargs)
                self.send()
                if self.buffers:
                    gpu.touch("plan", (), tuple(self.buffers))

            def send(self) -> None:
                pinned = self._pin_memory_int_workspace_buffer
                self._int_workspace.copy_(pinned.fill_(1), non_blocking=True)

            def run(self, *args: Any, **kwargs: Any) -> Tensor:
                gpu.touch("run", (self._int_workspace,))
                found: Tensor = super().run(*args, **kwargs)
                return found

        return OnGpu

    def fast_decode_plan(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        if gpu.values == "cpu":
            with gpu.in_kernel():
                fake.fast_decode_plan(wrapper, *args, **kwargs)
        wrapper.send()

    module: Any = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        setattr(module, name, on_gpu(getattr(fake, name)))
    module.fast_decode_plan = fast_decode_plan
    module.append_paged_kv_cache = fake.append_paged_kv_cache
    return module
