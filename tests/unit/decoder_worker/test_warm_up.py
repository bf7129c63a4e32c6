"""What a decoder does before its first window leaves nothing behind, and has written to memory."""

from __future__ import annotations

import torch

from cluster.common.messages import DecodeOptions
from decoder_worker.build import WINDOWS, warm_up
from tests.support.checkpoints import cached_checkpoint
from tests.support.workers.model_runners import RunnerBench


def tokens_of(bench: RunnerBench) -> list[int]:
    """What two steps of the window in slot 0 give."""
    sequence = bench.sequence(0, DecodeOptions(language="en"))
    tokens = []
    for step in (bench.runner.prefill, bench.runner.decode):
        ((output,),) = bench.runner.collect(step([sequence]))
        tokens.append(output.token)
        sequence.live[0].tokens.append(output.token)
    return tokens


def test_the_pages_that_are_taken_first_are_written_to_and_all_are_free() -> None:
    bench = RunnerBench(cached_checkpoint(), WINDOWS + 1, "cpu", "float32")
    cross, own = bench.pools
    bench.free()
    for pool in bench.pools:
        pool.tensor.fill_(torch.nan)
    warm_up(bench.runner, bench.prompts, cross, own)
    for pool in bench.pools:
        n_written = WINDOWS * pool.layout.pages_per_window
        assert not pool.tensor[:n_written].isnan().any()
        assert pool.tensor[n_written:].isnan().all()
        pool.check_integrity()
    assert cross.allocate(1) == own.allocate(1) == (0,)


def test_a_window_gives_the_same_tokens_after_it() -> None:
    """Its slot, which the silence had too, has nothing left of it."""
    expected = tokens_of(RunnerBench(cached_checkpoint(), 1, "cpu", "float32"))
    bench = RunnerBench(cached_checkpoint(), 1, "cpu", "float32")
    cross, own = bench.pools
    kv = cross.tensor.clone()
    bench.free()
    warm_up(bench.runner, bench.prompts, cross, own)
    assert cross.allocate(cross.layout.pages_per_window) is not None
    assert own.allocate(own.layout.pages_per_window) is not None
    cross.tensor.copy_(kv)
    assert tokens_of(bench) == expected
