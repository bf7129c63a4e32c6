"""Several decode steps at once choose what as many single steps choose, and end where they must."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from benchmark.shared.forced_length import forced_checkpoint
from cluster.common.kernels.cpu.background import wait_for_builds
from cluster.common.messages import DecodeOptions
from cluster.common.model.device import has_native_bfloat16
from decoder_worker.cpu import fused
from decoder_worker.cpu.arrays import PIECE
from decoder_worker.sampling.search import StepOutput
from decoder_worker.scheduling.sequence import DecodeSequence
from tests.support.checkpoints import SHAPES, cached_checkpoint
from tests.support.workers.model_runners import N_NEW_MAX, RunnerBench

BUILDS_S = 110.0
DTYPES = ["float32", "int8", *(["bfloat16"] if has_native_bfloat16() else [])]


@pytest.fixture(autouse=True)
def long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine too a run is of many steps."""
    monkeypatch.setattr(fused, "RUN_S", 60.0)


def make_bench(folder: Path, dtype: str, threads: int = 1) -> RunnerBench:
    """threads: with more than one, a run also ends where a helper was slow."""
    bench = RunnerBench(folder, 3, "cpu", dtype, threads=threads)
    assert wait_for_builds(BUILDS_S)
    return bench


def begun(bench: RunnerBench) -> list[DecodeSequence]:
    """Three windows whose prompts are run, so that they reach a piece's end at unlike steps."""
    prompts = [(), tuple(range(300, 300 + PIECE - 20)), tuple(range(400, 440))]
    options = [DecodeOptions(language="en", prompt_tokens=prompt) for prompt in prompts]
    sequences = [bench.sequence(slot, each) for slot, each in enumerate(options)]
    take(sequences, bench.runner.collect(bench.runner.prefill(sequences)))
    return sequences


def take(sequences: list[DecodeSequence], step: list[list[StepOutput]]) -> None:
    for sequence, (output,) in zip(sequences, step, strict=True):
        sequence.rows[0].tokens.append(output.token)
        sequence.rows[0].logprobs.append(output.logprob)


def stepped(bench: RunnerBench) -> list[tuple[list[int], list[float]]]:
    """Tokens and log probabilities by single steps, until a row has ended or is full."""
    sequences = begun(bench)
    while all(goes_on(bench, s) for s in sequences):
        take(sequences, bench.runner.collect(bench.runner.decode(sequences)))
    return [(s.rows[0].tokens, s.rows[0].logprobs) for s in sequences]


def goes_on(bench: RunnerBench, sequence: DecodeSequence) -> bool:
    tokens = sequence.rows[0].tokens
    return len(tokens) < N_NEW_MAX and tokens[-1] != bench.prompts.eot


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_steps_choose_what_single_ones_do(dtype: str, threads: int) -> None:
    bench = make_bench(cached_checkpoint("tiny"), dtype, threads)
    expected = stepped(bench)
    sequences, runs = begun(bench), []
    while all(goes_on(bench, s) for s in sequences):
        most = bench.runner.most_steps(sequences)
        assert 1 <= most <= N_NEW_MAX
        bench.runner.listen()
        made = bench.runner.decode_several(sequences, most)
        assert 1 <= len(made) <= most
        for step in made:
            take(sequences, step)
        runs.append(len(made))
    assert threads > 1 or max(runs) > 1
    assert [(s.rows[0].tokens, s.rows[0].logprobs) for s in sequences] == expected


def test_a_run_ends_with_the_step_in_which_a_row_ends(tmp_path: Path) -> None:
    bench = make_bench(forced_checkpoint(tmp_path, SHAPES["tiny"], 6), "float32")
    bench.pools[0].tensor.zero_()  # random KV is louder than what tells the length
    sequences = [bench.sequence(0, DecodeOptions(language="en"))]
    take(sequences, bench.runner.collect(bench.runner.prefill(sequences)))
    bench.runner.listen()
    made = bench.runner.decode_several(sequences, 12)
    tokens = [output.token for ((output,),) in made]
    assert tokens.index(bench.prompts.eot) == len(tokens) - 1 == 5


def test_who_interrupts_waits_for_one_step() -> None:
    bench = make_bench(cached_checkpoint("tiny"), "float32")
    sequences = begun(bench)
    bench.runner.listen()
    bench.runner.interrupt()
    assert len(bench.runner.decode_several(sequences, 12)) == 1
    bench.runner.listen()
    timer = threading.Timer(0.0, bench.runner.interrupt)
    timer.start()
    timer.join()
    assert len(bench.runner.decode_several(sequences, 12)) == 1


def test_sequences_that_somebody_decides_about_take_single_steps() -> None:
    bench = make_bench(cached_checkpoint("tiny"), "float32")
    options = [
        DecodeOptions(language="en", temperatures=(0.4,)),
        DecodeOptions(language="en", beam_size=2),
    ]
    for each in options:
        assert bench.runner.most_steps([bench.sequence(0, each)]) == 1
    assert bench.runner.most_steps([bench.sequence(0, DecodeOptions(language="en"))]) > 1
