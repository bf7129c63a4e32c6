"""Several decode steps at once, the warm-up, and weights that are held once, by a runner alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmark.shared.forced_length import forced_checkpoint
from cluster.common.messages import DecodeOptions
from cluster.common.model.device import has_native_bfloat16
from decoder_worker import backends
from decoder_worker.build import WINDOWS, warm_up
from decoder_worker.cpu import fused
from decoder_worker.cpu.arrays import PIECE
from decoder_worker.sampling.search import Row, StepOutput
from decoder_worker.scheduling.sequence import DecodeSequence
from tests.support.checkpoints import SHAPES, ModelShape, cached_checkpoint, make_checkpoint
from tests.support.references.hugging_face import assert_close
from tests.support.workers.model_runners import N_NEW_MAX, RunnerBench

# Several steps choose what as many single steps choose, and end where they must.


DTYPES = ["float32", "int8", *(["bfloat16"] if has_native_bfloat16() else [])]


@pytest.fixture(autouse=True)
def long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine too a run is of many steps."""
    monkeypatch.setattr(fused, "RUN_S", 60.0)


def make_bench(folder: Path, dtype: str, threads: int = 1) -> RunnerBench:
    """threads: with more than one, a run also ends where a helper was slow."""
    return RunnerBench(folder, 3, "cpu", dtype, threads=threads)


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


def test_sequences_that_somebody_decides_about_take_single_steps() -> None:
    bench = make_bench(cached_checkpoint("tiny"), "float32")
    options = [
        DecodeOptions(language="en", temperatures=(0.4,)),
        DecodeOptions(language="en", beam_size=2),
    ]
    for each in options:
        assert bench.runner.most_steps([bench.sequence(0, each)]) == 1
    assert bench.runner.most_steps([bench.sequence(0, DecodeOptions(language="en"))]) > 1


# What a decoder does before its first window leaves nothing behind, and has written to memory.


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


# A large model's weights are held once, and decode as those of torch's own layout do.


SHAPE = ModelShape(128, 2, 1, 2, n_vocab=2_000, n_languages=4)
SHARES = {"float32": 1e-5, "bfloat16": 0.02}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), SHAPE)


@pytest.mark.parametrize("dtype", SHARES)
def test_shared_weights_give_the_states_of_packed_ones(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    benches = [RunnerBench(folder, 2, "cpu", dtype)]
    monkeypatch.setattr(backends, "SHARED_FROM_BYTES", 0)
    benches.append(RunnerBench(folder, 2, "cpu", dtype))
    packed, shared = (bench.decoders.torch for bench in benches)
    for before, after in zip(packed.layers, shared.layers, strict=True):
        x = torch.randn(9, SHAPE.d_model).to(getattr(torch, dtype))
        for name in ("self_qkv", "self_out", "cross_q", "cross_out"):
            expected = getattr(before, name)(x).float()
            assert_close(name, getattr(after, name)(x).float(), expected, SHARES[dtype])
        assert_close("mlp", after.mlp(x.float()), before.mlp(x.float()), SHARES[dtype])
    logits = [prompt_logprob(bench) for bench in benches]
    assert logits[1] == pytest.approx(logits[0], abs=100 * SHARES[dtype])


def prompt_logprob(bench: RunnerBench) -> float:
    sequence = bench.sequence(0, DecodeOptions(language="en"))
    ((output,),) = bench.runner.collect(bench.runner.prefill([sequence]))
    return float(output.logprob)


# What is heard in a window is the same in any company.


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_no_speech_is_as_likely_in_company_as_alone(dtype: str) -> None:
    bench = RunnerBench(cached_checkpoint("tiny"), 12, "cpu", dtype, threads=2)
    plain, long = (
        DecodeOptions(language="en", prompt_tokens=tuple(range(300, 300 + n))) for n in (0, 40)
    )
    noisy = replace(plain, temperatures=(0.8,))

    def no_speech(*options: DecodeOptions) -> float:
        """Of the first one; the last one has a second row, which is a beam's where there are."""
        sequences = [bench.sequence(slot, each) for slot, each in enumerate(options)]
        if (last := sequences[-1]).options.beam_size > 1:
            slot = len(options)
            last.rows.append(Row(slot, bench.self_pages[slot]))
            last.begin_attempt(bench.prompts.eot)
        first = sequences[0]
        launch = bench.runner.prefill(sequences)
        found = dict(zip(launch.sequences, bench.runner.collect(launch), strict=True))
        return found[first][0].no_speech_prob

    companies = ([noisy, replace(plain, beam_size=2)], [noisy, long], [plain] * 9)
    for subject in (plain, long):
        alone = no_speech(subject)
        for company in companies:
            assert no_speech(subject, *company) == alone, company
