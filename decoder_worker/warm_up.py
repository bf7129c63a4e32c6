"""What a decoder on a CPU does before its first window, so that this one is as fast as later ones.

First calls choose kernels and allocate what products need, and memory that nobody has written to is
given by the system page by page, far more slowly than it is read. So a window of zeros is decoded
for a few steps, in the pages that are taken first.
"""

from __future__ import annotations

from concurrent.futures import Future

from cluster.common.kv.pool import PagePool
from cluster.common.messages import CrossKVHandle, DecodeOptions, DecodeRequest
from decoder_worker.model_runner import ModelRunner
from decoder_worker.prompts import PromptBuilder
from decoder_worker.sampling.search import Row
from decoder_worker.scheduling.sequence import DecodeSequence

STEPS = 2  # one by one, and as many at once
WINDOWS = 2  # whose pages of either pool are written to; pools take their first free ones


def warm_up(runner: ModelRunner, prompts: PromptBuilder, cross: PagePool, own: PagePool) -> None:
    """Decode silence. Both pools are the runner's, and all of their pages are free, as after it.

    Call on the thread that decodes, before the first sequence.
    """
    n_cross, n_own = cross.layout.pages_per_window, own.layout.pages_per_window
    for pool, n_pages in ((cross, n_cross), (own, n_own)):
        pool.tensor[: min(pool.n_pages, WINDOWS * n_pages)].zero_()
    cross_pages, own_pages = cross.allocate(n_cross), own.allocate(n_own)
    assert cross_pages is not None
    assert own_pages is not None
    try:
        sequence = _silence(prompts, cross.layout.n_frames, cross_pages, own_pages)
        runner.collect(runner.prefill([sequence]))
        for _ in range(STEPS):
            sequence.live[0].tokens.append(prompts.eot)
            runner.restore(sequence)
            runner.collect(runner.decode([sequence]))
        sequence.live[0].tokens.append(prompts.eot)
        runner.restore(sequence)
        if (most := runner.most_steps([sequence])) > 1:
            runner.decode_several([sequence], most)
    finally:
        cross.release(cross_pages)
        own.release(own_pages)


def _silence(
    prompts: PromptBuilder, n_frames: int, cross_pages: tuple[int, ...], own_pages: tuple[int, ...]
) -> DecodeSequence:
    handle = CrossKVHandle("", 0, 0, "", b"", "", (), 0, n_frames, 0, 0, "", 0.0)
    options = DecodeOptions()
    sequence = DecodeSequence(
        DecodeRequest("", 0, 0, handle, options, 0.0),
        Future(),
        arrived=0.0,
        deadline=0.0,
        n_new_max=2 * STEPS + 2,
        language=prompts.any_language,
        rows=[Row(0, own_pages)],
        cross_pages=cross_pages,
    )
    sequence.begin_attempt(prompts.eot)
    sequence.prompt = prompts.prompt(options, prompts.any_language)
    return sequence
