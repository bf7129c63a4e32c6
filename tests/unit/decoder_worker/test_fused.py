"""The decoder's layers as one program of several threads give what torch's layers give."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.common.kernels.cpu.tile_registers import (
    BLOCK_OUTPUTS,
    VECTORS,
    has_bfloat16_tiles,
    products_for,
    tile_config,
)
from cluster.common.kv.cross_kv import packed_page
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.cpu.arrays import fits_tiles, plain_head, stack_layers
from decoder_worker.cpu.fused import FusedDecoder, fits_layers
from decoder_worker.cpu.step_team import CLAIMED, LEAST_REST_S, WAITED, StepTeam
from decoder_worker.cpu.work_sharing import claim, finish, wait
from decoder_worker.model import DecoderTensors, TextDecoder, TorchDecoder
from tests.support.checkpoints import ModelShape, make_checkpoint
from tests.support.references.hugging_face import assert_close
from tests.support.workers.model_runners import rows_of

BUILD_S = 200.0
OWN_PAGE, CROSS_PAGE = 8, 300  # neither is a multiple of what a unit attends to
SHAPE = ModelShape(128, 2, 1, 2, n_vocab=2_000, n_languages=4)
FRAMES = (1500, 70)

DTYPES = {"float32": (torch.float32, 1e-5), "bfloat16": (torch.bfloat16, 0.02)}
IN_TILES = pytest.mark.skipif(not has_bfloat16_tiles(), reason="needs a CPU with AMX's bfloat16")
BY_VECTORS = pytest.mark.skipif(
    products_for(bfloat16=False, int8=True) is not VECTORS, reason="needs a CPU with AVX-512 VNNI"
)
FEW_ROWS, MANY_ROWS = 8, 21  # of tiles in one group, and in several


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_checkpoint(tmp_path_factory.mktemp("model"), SHAPE)))


class Bench:
    """One model with pools of random KV, and both ways through it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        threads: int,
        *,
        int8: bool,
        cross_page: int = CROSS_PAGE,
        packed: bool = False,
        tiles: Any = None,
        in_blocks: bool = False,
        cross_dtype: torch.dtype | None = None,
    ) -> None:
        dtype, self.share = DTYPES[name]
        generator = torch.Generator().manual_seed(5)

        def pool(n_pages: int, page_size: int, kind: torch.dtype) -> Tensor:
            shape = (n_pages, SHAPE.decoder_layers, 2, page_size, SHAPE.n_head, 64)
            return torch.randn(shape, generator=generator).to(kind)

        own = pool(4 * MANY_ROWS, OWN_PAGE, dtype)
        self.pools = (own, pool(16, cross_page, cross_dtype or dtype))
        tensors = DecoderTensors.load(checkpoint, dtype, "cpu")
        layers = stack_layers(
            tensors.by_name, tensors.dims, int8=int8, tiles=tiles, blocks=in_blocks
        )
        attention = TorchAttention(*self.pools, packed=packed)
        int8_head = int8 or dtype == torch.bfloat16
        self.torch = TorchDecoder.of(tensors, attention, int8=int8, int8_head=int8_head)
        head_tiles = tiles
        if tiles is None and not int8:  # bfloat16 has vectors for its head alone
            head_tiles = products_for(bfloat16=False, int8=int8_head)
        head = plain_head(tensors.head, int8=int8_head, tiles=head_tiles)
        team = StepTeam(threads - 1)
        self.compiled = FusedDecoder(
            tensors.dims, self.torch, self.pools, team, layers, head, packed=packed
        )
        assert self.compiled._kernels is not None

    def fused(self, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        return forward(self.compiled, batch)

    def reference(self, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        return forward(self.torch, batch)


@torch.inference_mode()
def forward(decoder: TextDecoder, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    decoder.plan(batch)
    states = decoder.states(*rows_of(batch, OWN_PAGE))
    return states, decoder.logits(states)


KINDS = ["float32", "bfloat16", pytest.param("bfloat16 in blocks", marks=IN_TILES)]


@pytest.fixture(scope="module", params=KINDS)
def bench(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Bench:
    dtype, _, way = request.param.partition(" ")
    tiles = tile_config() if way else None
    return Bench(checkpoint, dtype, threads=2, int8=False, tiles=tiles, in_blocks=bool(way))


def make_batch(counts: list[int], lengths: list[int], per_window: int = 1) -> AttentionBatch:
    """Entries of so many tokens, with so many positions then; so many of them share a window."""
    own = [[4 * entry + page for page in range(4)] for entry in range(len(counts))]
    n_windows = len(counts) // per_window
    windows = [[(5 * window + page) % 16 for page in range(5)] for window in range(n_windows)]
    frames = [FRAMES[window % 2] for window in range(n_windows)]
    queries = [per_window * n for n in counts[:n_windows]]
    return AttentionBatch(
        self_kv=PagedKV.make(counts, own, lengths, OWN_PAGE),
        cross_kv=PagedKV.make(queries, windows, frames, CROSS_PAGE),
    )


def steps(n: int, per_window: int = 1) -> AttentionBatch:
    return make_batch([1] * n, [1 + 3 * row % 31 for row in range(n)], per_window)


def ragged_prompts(*counts_and_cached: tuple[int, int]) -> AttentionBatch:
    """Of each sequence: tokens that are fed, behind so many that are there already."""
    return make_batch([n for n, _ in counts_and_cached], [sum(one) for one in counts_and_cached])


BATCHES = {
    "one row": steps(1),
    "three rows": steps(3),
    "six beams of one window": steps(6, per_window=6),
    "eight rows": steps(FEW_ROWS),
    "more": steps(MANY_ROWS),
    "prompts over two pages": ragged_prompts((3, 0), (4, 15)),
    "prompts of one token and of seven": ragged_prompts((1, 0), (7, 20)),
    "prompts of four lengths": ragged_prompts((3, 0), (7, 0), (1, 9), (4, 16)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_states_logits_and_pages_are_the_reference_ones(
    bench: Bench, batch: AttentionBatch
) -> None:
    states, logits = bench.fused(batch)
    written = bench.pools[0].clone()
    expected_states, expected_logits = bench.reference(batch)
    assert_close("states", states, expected_states, share=bench.share)
    assert_close("logits", logits, expected_logits, share=bench.share)
    assert_close("pages", written, bench.pools[0].float(), share=bench.share)


@pytest.mark.parametrize(
    ("name", "cross"), [*((name, None) for name in DTYPES), ("bfloat16", torch.float8_e4m3fn)]
)
def test_windows_of_trimmed_contexts_give_what_pages_of_all_positions_give(
    checkpoint: Checkpoint, name: str, cross: torch.dtype | None
) -> None:
    make = partial(Bench, checkpoint, name, 2, int8=False, cross_page=1500, cross_dtype=cross)
    usual, packed = make(), make(packed=True)
    lengths, own = [320, 1500, 384, 128], [[4 * row + i for i in range(4)] for row in range(6)]
    for page, length in enumerate(lengths):
        packed_page(packed.pools[1][page], length).copy_(usual.pools[1][page][:, :, :length])
    batch = AttentionBatch(
        self_kv=PagedKV.make([1] * 6, own, [1, 4, 7, 10, 13, 16], OWN_PAGE),
        cross_kv=PagedKV.make([1, 1, 1, 3], [[0], [1], [2], [3]], lengths, 1500),
    )
    prompts = AttentionBatch(
        self_kv=PagedKV.make([1, 3, 4], own[:3], [1, 3, 20], OWN_PAGE),
        cross_kv=PagedKV.make([1, 3, 4], [[0], [1], [2]], lengths[:3], 1500),
    )
    for each in (batch, prompts):
        expected_states, expected_logits = usual.reference(each)
        for states, logits in (packed.reference(each), packed.fused(each)):
            assert_close("states", states, expected_states, share=packed.share)
            assert_close("logits", logits, expected_logits, share=packed.share)


def test_rows_are_computed_by_the_decoder_that_is_faster_for_so_many(bench: Bench) -> None:
    """Longer prompts by torch, bit for bit, where no tiles multiply."""
    if bench.compiled._layers.tiles is not None:
        pytest.skip("tiles take as many")
    batch = ragged_prompts((1, 4), (9, 0))
    states, logits = bench.fused(batch)
    expected_states, expected_logits = bench.reference(batch)
    assert torch.equal(states, expected_states)
    assert_close("logits", logits, expected_logits, share=bench.share)
    assert not torch.equal(bench.fused(steps(2))[0], bench.reference(steps(2))[0])


def test_results_do_not_depend_on_who_helps(checkpoint: Checkpoint) -> None:
    alone = Bench(checkpoint, "bfloat16", threads=1, int8=False)
    helped = Bench(checkpoint, "bfloat16", threads=5, int8=False)
    for number in range(60):
        batch = steps(1 + number % FEW_ROWS)
        for one, other in zip(alone.fused(batch), helped.fused(batch), strict=True):
            assert torch.equal(one, other), f"forward {number}"


def test_a_row_in_tiles_does_not_depend_on_the_others(bench: Bench) -> None:
    if bench.compiled._layers.tiles is None:
        pytest.skip("not in tiles")
    states, logits = bench.fused(steps(MANY_ROWS))
    for n_rows in (1, 3, 8, 9):
        fewer_states, fewer_logits = bench.fused(steps(n_rows))
        assert torch.equal(fewer_states, states[:n_rows])
        assert torch.equal(fewer_logits, logits[:n_rows])


def test_weights_in_eight_bits_are_near_those_in_sixteen(checkpoint: Checkpoint) -> None:
    bench = Bench(checkpoint, "bfloat16", threads=2, int8=True)
    exact = Bench(checkpoint, "bfloat16", threads=2, int8=False)
    (states, logits), (exact_states, exact_logits) = bench.fused(steps(5)), exact.fused(steps(5))
    assert_close("states", states, exact_states, share=0.05)
    assert_close("logits", logits, exact_logits, share=0.05)
    head = DecoderTensors.load(checkpoint, torch.float32, "cpu").head
    assert_close("logits of bfloat16", exact_logits, exact_states @ head.t(), share=0.01)


@pytest.mark.parametrize(
    "tiles",
    [
        pytest.param(tile_config(), marks=IN_TILES, id="tiles"),
        pytest.param(VECTORS, marks=BY_VECTORS, id="vectors"),
    ],
)
def test_weights_in_eight_bits_give_by_tiles_and_vectors_what_they_give_without(
    checkpoint: Checkpoint, tiles: Any
) -> None:
    fast = Bench(checkpoint, "bfloat16", 2, int8=True, tiles=tiles, in_blocks=True)
    plain = Bench(checkpoint, "bfloat16", 2, int8=True)
    for n_rows in (1, FEW_ROWS):
        (states, logits), (plain_states, plain_logits) = (
            bench.fused(steps(n_rows)) for bench in (fast, plain)
        )
        assert_close("states", states, plain_states, share=0.002)
        assert_close("logits", logits, plain_logits, share=0.002)


def test_a_row_of_nan_stays_one_and_leaves_others_alone(bench: Bench) -> None:
    batch = steps(4)
    healthy, _ = bench.fused(batch)
    cross = bench.pools[1]
    before = cross[5].clone()  # the first page of the second row's window
    cross[5] = float("nan")
    states, logits = bench.fused(batch)
    cross[5] = before
    assert logits[1].isnan().all()
    assert torch.equal(states[[0, 2, 3]], healthy[[0, 2, 3]])


def test_widths_that_units_or_tiles_do_not_make_up_are_known(checkpoint: Checkpoint) -> None:
    dims = checkpoint.dims
    assert fits_layers(dims)
    assert fits_tiles(dims)
    assert not fits_layers(replace(dims, n_text_ffn=1000))
    assert not fits_tiles(replace(dims, n_text_ffn=BLOCK_OUTPUTS + 32))


def test_a_helper_that_fails_within_a_unit_fails_the_job_and_holds_nobody() -> None:
    team, has_unit, outcomes = StepTeam(2), threading.Event(), list[str]()

    def job(counters: Any, begin: int, leads: bool) -> None:
        if leads:
            assert has_unit.wait(BUILD_S)
        while claim(counters, begin + 2) >= 0:
            if not leads and not has_unit.is_set():
                has_unit.set()
                raise MemoryError("no room")
            finish(counters)
        wait(counters, begin + 2, leads)

    def lead() -> None:
        for _ in range(2):
            try:
                team.run(job, 2)
                outcomes.append("done")
            except MemoryError as error:
                outcomes.append(str(error))

    leader = threading.Thread(target=lead, daemon=True)
    leader.start()
    leader.join(BUILD_S)
    assert outcomes == ["no room", "done"]


def test_a_job_that_fails_is_told_once_helpers_have_left_it_and_the_next_one_is_done() -> None:
    team, entered, may_end = StepTeam(1), threading.Event(), threading.Event()
    left, done = list[int](), list[int]()

    def work(counters: Any, begin: int, leads: bool) -> None:
        if leads:
            assert counters[CLAIMED] == begin, "another job's units are open"
            counters[CLAIMED] += 3
            done.append(begin)

    def fail(counters: Any, begin: int, leads: bool) -> None:
        if leads:
            assert entered.wait(BUILD_S)
            threading.Timer(0.1, may_end.set).start()
            raise MemoryError("no room")
        entered.set()
        assert may_end.wait(BUILD_S)
        left.append(begin)

    team.run(work, 3)
    with pytest.raises(MemoryError):
        team.run(fail, 5)
    assert left == [3]
    team.run(work, 3)
    assert done == [0, 0]


def test_helpers_end_with_their_team() -> None:
    before = set(threading.enumerate())
    team = StepTeam(3)
    own = set(threading.enumerate()) - before
    assert [thread.name for thread in own] == ["decoder-helper"] * 3
    done: list[bool] = []
    team.run(lambda counters, begin, leads: done.append(leads), 1)
    assert True in done, "the leader did its part"
    del team
    for thread in own:
        thread.join(BUILD_S)
        assert not thread.is_alive()


def test_helpers_that_get_no_time_are_left_alone_for_a_while() -> None:
    team, posted = StepTeam(1), set[int]()

    def job(counters: Any, begin: int, leads: bool) -> None:
        if not leads:
            posted.add(begin)
        elif begin == 0:
            counters[WAITED] += 1  # as `work_sharing.wait` does after a long wait

    team.run(job, 1)
    rested_from = time.monotonic()
    while not posted - {0} and time.monotonic() < rested_from + BUILD_S:
        team.run(job, 1)
        time.sleep(0.001)
    assert posted - {0}, "never asked again"
    assert time.monotonic() - rested_from >= LEAST_REST_S
