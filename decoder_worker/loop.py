"""The work of the engine's thread: schedule sequences, load their KV, run them, post-process.

Other threads reach the loop through `post`, as the end of a READ does, so loading never blocks a
step. Forwards go through `launch_queue`; word times are computed on a thread beside this one.

Invariants: a failure belongs to its sequence; a sequence's pages and lease have one way back,
`_retire`; pages that a READ or a launched forward may still write to stay held until it has ended.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import accumulate

from cluster.common.errors import (
    DeadlineExceededError,
    KVLostError,
    SequenceFailedError,
    SplitscribeError,
    TransferTimeoutError,
)
from cluster.common.failed_batches import DeviceLostError, run_batch
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.wire import FetchStats
from cluster.common.messages import DecodeResult, TokenAlignment
from cluster.common.model.text.quality import compression_ratio
from cluster.common.priorities import URGENCY, URGENT
from decoder_worker.alignment import PendingAlignment
from decoder_worker.build import EngineParts
from decoder_worker.launch_queue import Kind, LaunchQueue
from decoder_worker.prompts import PromptBuilder
from decoder_worker.sampling.search import StepOutput
from decoder_worker.scheduling.scheduler import TOKENS_AT_ONCE
from decoder_worker.scheduling.sequence import (
    Attempt,
    DecodeSequence,
    SequenceState,
    finished_result,
    given_attempt,
    is_doubted,
    is_final,
)
from decoder_worker.states import Landing
from decoder_worker.stats import Counters

logger = logging.getLogger(__name__)

IDLE_S = 0.1  # longest sleep between steps: nothing wakes the loop when quarantined pages come back
EMPTY_S = 1.0  # the same without sequences: one that arrives wakes the loop
MIXED_S = 2.0  # after the last sequence that is not urgent: the encoder may have more of them

NO_PROBABILITY = "the model gave no finite probability"

Call = Callable[[], None]


class DecodeLoop:
    """One worker's sequences, from their arrival to their answer.

    post: has a call made on this thread, before the next step. beside: the same on another thread.
    on_leave: called when a sequence stops waiting, and again when it is gone.
    """

    def __init__(
        self,
        importer: KVImporter,
        prompts: PromptBuilder,
        parts: EngineParts,
        post: Callable[[Call], None],
        beside: Callable[[Call], object],
        on_leave: Callable[[SequenceState], None],
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler = parts.scheduler
        runner = parts.runner
        self.listen, self.interrupt = runner.listen, runner.interrupt
        self.counters = Counters()
        self._importer = importer
        self._prompts = prompts
        self._runner = runner
        self._post = post
        self._beside = beside
        self._unaligned: list[DecodeSequence] = []  # decoded; without peaks or words yet
        # Aligned, without word times yet. This thread appends, the one beside it removes.
        self._wordless: list[tuple[DecodeSequence, PendingAlignment]] = []
        self._told: list[DecodeSequence] = []  # their language is known, their prompt has not run
        self._on_leave = on_leave
        self._clock = clock
        self._others_s = -math.inf  # when a sequence that is not urgent was last seen
        self._landing = Landing(
            parts.projection, scheduler.release_landing, self._fail, self._retire
        )
        self._launches = LaunchQueue(
            runner, parts.steps_ahead, self.counters, self._take, self._fail, self._retire, clock
        )

    def cancel(self, sequence: DecodeSequence) -> None:
        self.counters.cancelled += 1
        self._retire(sequence)

    def step(self) -> bool:
        """Schedule, run, post-process. False if nothing could run."""
        self._expire()
        self._start_loading()
        self._landing.step()
        was_landing = len(self._landing) > 0
        started = self.scheduler.start_running()
        if started or self._told:
            self._prefill(started)
        running = self.scheduler.next_step()
        if running:
            uninterrupted = not (was_landing or self.scheduler.is_mixed)
            self._launches.decode(running, uninterrupted=uninterrupted)
        else:
            self._launches.collect()
            if not started:
                self._landing.wait()
        if unaligned := self._take_unaligned():
            self._align(unaligned)
        return bool(started or running or unaligned or self._told or was_landing)

    def is_hurried(self) -> bool:
        """Whether there are urgent sequences, and were others within the last MIXED_S."""
        classes, now = self.scheduler.classes(), self._clock()
        if classes - URGENT:
            self._others_s = now
        return bool(classes & URGENT) and now - self._others_s < MIXED_S

    def sleep_s(self) -> float:
        longest_s = EMPTY_S if self.scheduler.is_idle() else IDLE_S
        return max(0.0, min(longest_s, self.scheduler.next_deadline() - self._clock()))

    def fail_all(self, error: Exception) -> None:
        """Answer every sequence with `error`; those whose READ is in flight are retired later."""
        self._landing.finish()
        self._launches.abandon()
        for sequence in self.scheduler.everything():
            try:
                self._end(sequence, error)
            except Exception:
                logger.exception("%r could not be taken back", sequence)

    def _expire(self) -> None:
        for sequence in self.scheduler.expired(self._clock()):
            where = sequence.state.value
            self._end(sequence, DeadlineExceededError(f"the deadline passed while {where}"))

    def _start_loading(self) -> None:
        for sequence in self.scheduler.admit():
            self._on_leave(SequenceState.WAITING)
            sequence.load_started = self._clock()
            try:
                fetch = self._importer.fetch(sequence.request.handle, sequence.fetched_pages)
            except Exception as error:
                self._end(sequence, _as_failure("the READ could not begin", error))
                continue
            sequence.reading = True
            fetch.add_done_callback(partial(self._hand_over, sequence))

    def _hand_over(self, sequence: DecodeSequence, fetch: Future[FetchStats]) -> None:
        """Runs on the importer's thread."""
        self._post(partial(self._on_fetched, sequence, fetch))

    def _on_fetched(self, sequence: DecodeSequence, fetch: Future[FetchStats]) -> None:
        sequence.reading = False
        error = KVLostError("the READ was given up") if fetch.cancelled() else fetch.exception()
        if error is not None:
            if isinstance(error, TransferTimeoutError):
                sequence.forget_fetched()
            self._end(sequence, error)
            return
        stats = sequence.fetched = fetch.result()
        sequence.loaded = self._clock()
        self.counters.transfers += 1
        self.counters.transfer_bytes += stats.n_bytes
        self.counters.transfer_s += stats.seconds
        if sequence.resolved:  # cancelled, or past its deadline, while its KV was in flight
            self._retire(sequence)
        elif sequence.landing_pages:
            self._landing.add(sequence)

    def _prefill(self, started: list[DecodeSequence]) -> None:
        """Run prompts of known languages; detected ones come with a later forward's results."""
        now = self._clock()
        for sequence in started:
            sequence.prefill_started = sequence.prefill_started or now
        known = [sequence for sequence in started if sequence.language is not None]
        self._launches.launch(Kind.LANGUAGE, [s for s in started if s.lacks_language])
        known, self._told = [*known, *self._told], []
        # A resolved sequence is retired later, when nothing of it is in flight any more.
        ready = [s for s in known if s.state is SequenceState.RUNNING and not s.resolved]
        for sequence in ready:
            assert sequence.language is not None
            if sequence.options.detect_only:
                sequence.attempts.append(given_attempt((), sequence.language_logprob))
                self._end(sequence, finished_result(sequence, self._clock()))
                continue
            if sequence.options.known_text:
                sequence.attempts.append(given_attempt(sequence.options.known_text))
                self._unaligned.append(sequence)
                continue
            sequence.prompt = self._prompts.prompt(sequence.options, sequence.language)
            sequence.begin_attempt(self._prompts.eot)
        ready = [s for s in ready if s.search is not None]
        self.counters.prefills += len(ready)
        self._launches.launch(Kind.PREFILL, ready)

    def _take(self, kind: Kind, sequence: DecodeSequence, rows: list[StepOutput]) -> None:
        if kind is Kind.DECODE:
            sequence.steps += 1
        elif kind is Kind.LANGUAGE:
            self._take_language(sequence, rows[0])
            return
        else:
            sequence.decode_started = sequence.decode_started or self._clock()
            sequence.no_speech_prob = rows[0].no_speech_prob
        self._take_outputs(sequence, rows)

    def _take_language(self, sequence: DecodeSequence, output: StepOutput) -> None:
        if not math.isfinite(output.logprob):
            self._end(sequence, SequenceFailedError(NO_PROBABILITY))
            return
        sequence.language = self._prompts.language_of(output.token)
        sequence.language_logprob = output.logprob
        self._told.append(sequence)

    def _fail(self, sequence: DecodeSequence, error: Exception) -> None:
        self._end(sequence, _as_failure("decoding failed", error))

    def _take_unaligned(self) -> list[DecodeSequence]:
        """Remove and return the most urgent texts: TOKENS_AT_ONCE at most, one text at least."""
        waiting = [s for s in self._unaligned if s.state is SequenceState.RUNNING]
        waiting.sort(key=lambda s: URGENCY[s.priority])
        n_tokens = accumulate(len(s.attempts[-1].hypothesis.tokens) for s in waiting)
        n = max(1, sum(total <= TOKENS_AT_ONCE for total in n_tokens))
        self._unaligned = waiting[n:]
        return waiting[:n]

    def _align(self, finished: list[DecodeSequence]) -> None:
        """Find peaks, launch the alignment of words, and answer sequences that want no words."""
        wanted = [s for s in finished if s.options.peaks]  # words overwrite the prompt's KV
        for sequence, peaks in run_batch(wanted, self._runner.peaks, self._fail):
            sequence.peaks = peaks
        worded = [s for s in finished if s.options.words and not s.resolved]
        begun = dict(run_batch(worded, self._runner.align, self._fail))
        for sequence in finished:
            if sequence.state is not SequenceState.RUNNING:
                continue
            if (pending := begun.get(sequence)) is None:
                self._end(sequence, finished_result(sequence, self._clock()))
                continue
            if not sequence.n_in_flight:
                self.scheduler.release_rows(sequence)
            self._wordless.append((sequence, pending))
            self._beside(self._find_words)

    def _find_words(self) -> None:
        """Compute the word times of the most urgent text. Called once for each, beside the loop."""
        first = min(self._wordless, key=lambda one: URGENCY[one[0].priority])
        self._wordless.remove(first)
        sequence, pending = first
        found: TokenAlignment | Exception
        try:
            found = pending.find()
        except Exception as error:
            found = error
        self._post(partial(self._on_words, sequence, found))

    def _on_words(self, sequence: DecodeSequence, found: TokenAlignment | Exception) -> None:
        if isinstance(found, DeviceLostError):
            raise found
        if isinstance(found, Exception):
            self._fail(sequence, found)
            return
        sequence.alignment = found
        self._end(sequence, finished_result(sequence, self._clock()))

    def _take_outputs(self, sequence: DecodeSequence, outputs: list[StepOutput]) -> None:
        for output in outputs:
            if not math.isfinite(output.logprob):
                self._end(sequence, SequenceFailedError(NO_PROBABILITY))
                return
        search = sequence.search
        assert search is not None
        self.counters.tokens += len(outputs)
        copies = search.take(outputs)
        if search.done:
            self._end_attempt(sequence)
            return
        if copies:
            self._runner.copy_kv(sequence, copies)
        if search.n_top:
            self._runner.restore(sequence)  # it chose otherwise than the sampler noted

    def _end_attempt(self, sequence: DecodeSequence) -> None:
        """Note the attempt; then answer, try the next temperature, or align the words."""
        search = sequence.search
        assert search is not None
        hypothesis = search.best()
        text = (*sequence.options.prefix_tokens, *hypothesis.tokens)
        ratio = compression_ratio(self._prompts.text_of(text))
        sequence.attempts.append(Attempt(hypothesis, sequence.temperature, ratio))
        sequence.search = None
        is_trimmed = sequence.n_positions < self._importer.layout.n_frames
        if is_trimmed and is_doubted(sequence, self._prompts.timestamp_begin):  # encode it in full
            self.counters.doubted += 1
            self._end(sequence, finished_result(sequence, self._clock(), doubted=True))
        elif not is_final(sequence):
            self.counters.fallbacks += 1
            self.scheduler.repeat(sequence)
        elif sequence.options.words or sequence.options.peaks:
            self._unaligned.append(sequence)
        else:
            self._end(sequence, finished_result(sequence, self._clock()))

    def _end(self, sequence: DecodeSequence, outcome: DecodeResult | BaseException) -> None:
        """Release what the sequence holds, then answer its caller in any case."""
        try:
            self._retire(sequence)
        finally:
            self._answer(sequence, outcome)

    def _answer(self, sequence: DecodeSequence, outcome: DecodeResult | BaseException) -> None:
        if sequence.resolved or not sequence.future.set_running_or_notify_cancel():
            return  # it was answered before, or its caller left
        if isinstance(outcome, DecodeResult):
            self.counters.finished += 1
            sequence.future.set_result(outcome)
        else:
            self.counters.failed += 1
            sequence.future.set_exception(outcome)

    def _retire(self, sequence: DecodeSequence) -> None:
        """The one way back for pages, slot and lease; idempotent."""
        if sequence.reading or sequence.n_in_flight:
            return  # when that ends, this is called again
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.WAITING:
            self._on_leave(SequenceState.WAITING)
        self.scheduler.release(sequence)
        if sequence.fetched is None:  # else the READ released the lease
            try:
                self._importer.drop(sequence.request.handle)
            except Exception:
                logger.exception("dropping the handle of %r failed: its lease expires", sequence)
        self._on_leave(SequenceState.FINISHED)


def _as_failure(what: str, error: Exception) -> SplitscribeError:
    """Return our own errors as they are, any other as a failure of the sequence."""
    if isinstance(error, SplitscribeError):
        return error
    failure = SequenceFailedError(f"{what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
