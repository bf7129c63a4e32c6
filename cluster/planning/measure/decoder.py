"""Times a decoder's forwards in this process: prompts and decode steps, by rows and positions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from cluster.jit.background import wait_for_builds
from cluster.kv.importer import KVImporter
from cluster.messages import CrossKVHandle, DecodeOptions, DecodeRequest
from cluster.model.checkpoint import Checkpoint
from cluster.model.device import use_step_threads
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.planning.profile.model import StepPoint
from cluster.settings import DecoderSettings
from decoder_worker.build import EngineParts, build_parts
from decoder_worker.prompts import PromptBuilder
from decoder_worker.sampling.search import Row
from decoder_worker.scheduling.sequence import DecodeSequence

FIRST = 3  # forwards that warm up
DEADLINE_S = 600.0

Tell = Callable[[str], None]


class StepTimer:
    """Owns a decoder's parts, without an engine's thread. Call on one thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        importer: KVImporter,
        settings: DecoderSettings,
        kernels_s: float,
    ) -> None:
        """settings: with the batch's size filled in."""
        tokenizer = WhisperTokenizer.from_checkpoint(checkpoint)
        self.parts: EngineParts = build_parts(checkpoint, tokenizer, importer, None, settings, 0)
        self._prompts = PromptBuilder(tokenizer, checkpoint.dims)
        self._cross_pool = importer.pool
        use_step_threads(settings.threads)
        if kernels_s and self.parts.device == "cpu":
            wait_for_builds(kernels_s)
        self._cross_pool.tensor.zero_()
        self.parts.self_pool.tensor.zero_()

    def time(
        self, rows: Sequence[int], contexts: Sequence[int], rounds: int, tell: Tell
    ) -> tuple[list[StepPoint], list[StepPoint]]:
        """Decode steps, and prompts: the fastest of `rounds` for each number of rows."""
        steps, prefills = [], []
        for n_rows in rows:
            for context in contexts:
                prefill_s, step_s = self._time(n_rows, context, rounds)
                prefills.append(StepPoint(rows=n_rows, positions=context, seconds=prefill_s))
                steps.append(StepPoint(rows=n_rows, positions=context, seconds=step_s))
                tell(
                    f"decoder: {n_rows} rows of {context} positions: prompts in "
                    f"{1000 * prefill_s:.2f} ms, a step in {1000 * step_s:.2f} ms"
                )
        return steps, prefills

    def _time(self, n_rows: int, context: int, rounds: int) -> tuple[float, float]:
        runner, sequences = (
            self.parts.runner,
            [self._sequence(slot, context) for slot in range(n_rows)],
        )
        try:
            prefills = []
            for _ in range(FIRST + rounds):
                began = time.perf_counter()
                runner.collect(runner.prefill(sequences))
                prefills.append(time.perf_counter() - began)
            steps = []
            for _ in range(FIRST + rounds):
                for sequence in sequences:
                    sequence.live[0].tokens.append(self._prompts.eot)
                    runner.restore(sequence)
                began = time.perf_counter()
                runner.collect(runner.decode(sequences))
                steps.append(time.perf_counter() - began)
        finally:
            for sequence in sequences:
                self._cross_pool.release(sequence.cross_pages)
                self.parts.self_pool.release(sequence.rows[0].self_pages)
        return min(prefills[FIRST:]), min(steps[FIRST:])

    def _sequence(self, slot: int, context: int) -> DecodeSequence:
        """Silence of so many positions, in pages of its own."""
        cross = self._cross_pool.allocate(self._cross_pool.layout.pages_for(context))
        own = self.parts.self_pool.allocate(self.parts.self_pool.layout.pages_per_window)
        assert cross is not None
        assert own is not None
        handle = CrossKVHandle("", 0, 0, "", b"", "", (), 0, context, 0, 0, "", 0.0)
        language, options = self._prompts.any_language, DecodeOptions()
        sequence = DecodeSequence(
            DecodeRequest("", 0, 0, handle, options, 0.0),
            Future(),
            arrived=0.0,
            deadline=DEADLINE_S,
            n_new_max=self._prompts.n_new_max(options),
            language=language,
            rows=[Row(slot, own)],
            cross_pages=cross,
        )
        sequence.prompt = self._prompts.prompt(options, language)
        sequence.begin_attempt(self._prompts.eot)
        return sequence
