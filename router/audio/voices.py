"""Finds the speakers of an upload, step by step, in an audio worker.

The detector finds stretches of speech, the network makes a vector of each 1.5 s, and
`router.audio.clustering` finds the turns. Only vectors of live sessions leave this process.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cluster.common.errors import AudioTooShortError, InvalidAudioError, InvalidRequestError
from cluster.common.messages import SAMPLE_RATE, WINDOW_SAMPLES, Pcm
from router.audio.audio_file import AudioFile
from router.audio.clustering import Stretch, find_turns
from router.audio.embedding import (
    BATCH,
    HOP_SAMPLES,
    Features,
    SpeakerNetwork,
    Vectors,
    directions,
    windows_of,
)
from router.audio.protocol import AudioLimits, Finished, Opened, SpeakerSearch, Voice
from router.audio.vad import (
    BLOCK_SAMPLES,
    FRAME_SAMPLES,
    HeardAudio,
    SharedStream,
    SpeechDetector,
    runs,
    speech_mask,
)

MAX_STRETCH_FRAMES = 20 * HOP_SAMPLES // FRAME_SAMPLES  # 15 s: a longer one is cut
# For turns. Stricter than for words, so that pauses separate turns.
THRESHOLD, RELEASE = 0.5, 0.35
REFERENCE_S = (1.2, 10.0)  # length of a known voice's recording, as at OpenAI

Event = Opened | Finished | None


class Heard:
    """Finds stretches of speech and the vectors of their windows. Yields between steps."""

    def __init__(
        self,
        detector: SpeechDetector,
        network: SpeakerNetwork,
        shared: SharedStream | None = None,
    ) -> None:
        self.stretches: list[Stretch] = []
        self._shared = shared or SharedStream(detector)
        self._audio = HeardAudio(self._shared.reader())
        self._vad = replace(detector.options, threshold=THRESHOLD, release=RELEASE)
        self._network = network
        self._waiting: list[Features] = []
        self._vectors: list[Vectors] = []

    @property
    def n_samples(self) -> int:
        return self._audio.end

    def feed(self, pcm: Pcm) -> Iterator[None]:
        self._audio.add(pcm)
        if self.n_samples > WINDOW_SAMPLES:  # less is heard at its end, as in the cutter
            yield from self._hear(BLOCK_SAMPLES)

    def finish(self) -> Generator[None, None, Vectors]:
        """Return the vectors [n, size] in the order of the stretches."""
        if 0 < self.n_samples <= WINDOW_SAMPLES and not self._shared.found:
            pcm = self._audio.join()
            self._audio.feed = self._shared.of_clip(max(int(pcm.max()), -int(pcm.min())))
        yield from self._hear(1)
        yield from self._complete(is_end=True)
        if self._waiting:
            self._embed()
        return np.concatenate(self._vectors) if self._vectors else np.empty((0, 1), np.float32)

    def _hear(self, least: int) -> Iterator[None]:
        for _ in self._audio.hear(least):
            yield from self._complete(is_end=False)
            yield

    def _complete(self, *, is_end: bool) -> Iterator[None]:
        audio = self._audio
        n_frames = done = audio.probabilities.shape[0]
        if not is_end:  # unfinished speech waits for what follows
            quiet = np.flatnonzero(audio.probabilities < self._vad.release)
            done = int(quiet[-1]) + 1 if quiet.size else 0
            if n_frames - done > MAX_STRETCH_FRAMES:
                done = n_frames
        for first, last in runs(speech_mask(audio.probabilities[:done], self._vad)):
            for at in range(first, last, MAX_STRETCH_FRAMES):
                end = min(last, at + MAX_STRETCH_FRAMES)
                piece = audio.pcm[at * FRAME_SAMPLES : end * FRAME_SAMPLES]
                yield from self._add(audio.sample(at), piece)
        audio.drop(done)

    def _add(self, start: int, pcm: Pcm) -> Iterator[None]:
        middles = []
        for middle, features in windows_of(pcm):
            middles.append(start + middle)
            self._waiting.append(features)
            if len(self._waiting) == BATCH:
                self._embed()
                yield
        self.stretches.append(Stretch(start, start + pcm.shape[0], tuple(middles)))

    def _embed(self) -> None:
        self._vectors.append(self._network.embed(self._waiting))
        self._waiting.clear()


@dataclass(frozen=True, slots=True)
class Voices:
    detector: SpeechDetector
    network: SpeakerNetwork
    limits: AudioLimits

    def turns_of(
        self, path: Path, search: SpeakerSearch, shared: SharedStream | None = None
    ) -> Generator[Event]:
        """Yield `Opened`, then `Finished` with turns or a voice, and None between steps. Raises
        as `AudioFile`, and InvalidAudioError for a reference.
        """
        known = []
        for name, reference in search.references:
            known.append((yield from self._reference(name, Path(reference))))
        heard = Heard(self.detector, self.network, shared)
        with closing(AudioFile(path, self.limits)) as file:
            yield Opened(file.declared_s)
            for pcm in file.blocks():
                yield from heard.feed(pcm)
                yield None
        vectors = yield from heard.finish()
        if search.is_one:
            yield Finished(heard.n_samples, voice=_voice_of(vectors, heard.stretches))
            return
        turns = yield from find_turns(vectors, heard.stretches, search, known)
        yield Finished(heard.n_samples, turns=tuple(turns))

    def _reference(self, name: str, path: Path) -> Generator[None, None, Vectors]:
        """The vector of a known voice, [size]. Raises InvalidAudioError."""
        heard = Heard(self.detector, self.network)
        longest = round(REFERENCE_S[1] * SAMPLE_RATE)
        try:
            with closing(AudioFile(path, self.limits)) as file:
                for pcm in file.blocks():
                    yield from heard.feed(pcm)
                    if heard.n_samples > longest:  # refused below; the rest is not decoded
                        break
        except AudioTooShortError:
            pass  # refused below
        except InvalidRequestError as error:
            raise _refused(name, f"cannot be read: {error.message}") from error
        if not REFERENCE_S[0] * SAMPLE_RATE <= heard.n_samples <= longest:
            least, most = REFERENCE_S
            raise _refused(name, f"must have {least:g} to {most:g} s of audio")
        vectors = yield from heard.finish()
        if not vectors.shape[0]:
            raise _refused(name, "has no speech in it")
        return _direction(vectors)


def _voice_of(vectors: Vectors, stretches: Iterable[Stretch]) -> Voice | None:
    if not vectors.shape[0]:
        return None
    n_speech = sum(stretch.end - stretch.start for stretch in stretches)
    return tuple(np.round(_direction(vectors), 5).tolist()), n_speech


def _direction(vectors: Vectors) -> Vectors:
    """Mean direction [size], of length 1."""
    voice: Vectors = directions(vectors.sum(axis=0, keepdims=True))[0]
    return voice


def _refused(name: str, why: str) -> InvalidAudioError:
    return InvalidAudioError(
        f"The reference of the speaker '{name}' {why}.",
        param="known_speaker_references",
        code="invalid_value",
    )
