"""Our calls of flashinfer against the installed package: its own Python, on the CPU.

Its compiled modules stand in (`tests.support.gpu.flashinfer_on_cpu`); signatures, checks and plans
are the real ones, so that a release that changes one of them fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module

import pytest
import torch

from decoder_worker.backends import Attentions
from tests.gpu_kit.kernels import ask_for_kernels
from tests.gpu_kit.packages import installed
from tests.support.checkpoints import cached_checkpoint
from tests.support.gpu.fake_flashinfer import BACKEND
from tests.support.gpu.flashinfer_on_cpu import OnCpu, flashinfer_on_cpu, our_imports
from tests.support.workers.decoder_engines import assert_same, make_stand

pytestmark = [  # slow: flashinfer is pinned, and only another version changes the result
    pytest.mark.slow,
    pytest.mark.skipif(
        not installed("gpu-check"),
        reason="needs flashinfer's own Python (`make gpu-check-install` fetches it)",
    ),
]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnCpu]:
    with flashinfer_on_cpu(cache=tmp_path_factory.mktemp("flashinfer")) as asked:
        yield asked


def test_what_we_import_is_there_and_called(asked: OnCpu) -> None:
    """Every name that our code takes from flashinfer is there, and meets its signature here."""
    ask_for_kernels(asked)
    imported = {name for names in our_imports().values() for name in names}
    assert imported <= {name.partition(".")[0] for name in asked.called}
    assert {"BatchDecodeWithPagedKVCacheWrapper.plan", "fast_decode_plan"} <= asked.called


def test_every_call_binds_and_the_engine_gives_the_same_texts(asked: OnCpu) -> None:
    """All kinds of requests, through flashinfer's own wrappers, plans and checks, in float32."""
    backend = import_module(BACKEND)

    def choose(own: torch.Tensor, cross: torch.Tensor) -> Attentions:
        kernels = backend.FlashInfer(own, cross)
        return Attentions(kernels.ragged(), kernels.fixed)

    make = partial(make_stand, cached_checkpoint(), max_batch=8, page_tokens=16, page_frames=100)
    with make() as stand:
        expected = stand.decode_all()
    with make(steps_ahead=1, attention=choose) as stand:
        for result, other in zip(stand.decode_all(), expected, strict=True):
            assert_same(result, other)
        stand.assert_all_returned()
