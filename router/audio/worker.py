"""The audio worker: a process that decodes uploads and cuts them into windows.

It works on many uploads in steps of a few milliseconds, mostly on the one with the least processor
time, so that clips do not wait for long files. An upload without credit waits for its consumer.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import time
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cluster.common.errors import SplitscribeError, WorkerError
from cluster.common.kernels.cpu.cache import ensure_jit_cache
from cluster.common.messages import HOP_LENGTH, SAMPLE_RATE, Pcm
from cluster.common.model.checkpoint import N_FFT
from cluster.common.model.mel_filters import mel_filters
from cluster.common.priorities import let_encoder_go_first, run_when_idle
from router.api.params import Chunking
from router.audio.audio_file import AudioFile
from router.audio.channels import ChannelSurvey
from router.audio.cutter import WindowCutter
from router.audio.embedding import SpeakerNetwork
from router.audio.protocol import (
    MAX_STEP_S,
    AudioLimits,
    Command,
    Failed,
    Finished,
    Opened,
    OpenUpload,
    Order,
    Ready,
    UploadEvent,
    UploadReport,
    UploadSlot,
    WindowFound,
    pack,
    unpack_command,
)
from router.audio.vad import SharedStream, SpeechDetector
from router.audio.voices import Voices
from router.audio.windows import CutOptions, Pieces, Window

MAX_MESSAGE_CHARS = 500
FRAME_GRID_S = 0.01  # error of a pause on the detector's grid
OLDEST_EVERY = 4  # steps: every so many go to the upload that waits longest
MEL_FLOOR = 1e-10  # power below which the logarithm is cut
HALF_FFT = N_FFT // 2

Steps = Generator[Opened | Window | Finished | None]


@dataclass(slots=True)
class Upload:
    id: int
    steps: Steps
    credit: int  # windows that the router still accepts
    skip: int = 0  # windows that it has from a dead worker
    max_busy_s: float = math.inf
    max_step_s: float = MAX_STEP_S
    busy_s: float = 0.0  # processor time so far
    last_step: int = 0


class AudioWorker:
    def __init__(self, connection: Connection, slot: UploadSlot, limits: AudioLimits) -> None:
        self._connection = connection
        self._slot = slot
        self._limits = limits
        self._detector = SpeechDetector()
        model = limits.speaker_model
        self._network = None if model is None else SpeakerNetwork(Path(model))
        self._uploads: dict[int, Upload] = {}
        # By file and channel. A path may be reused for another file.
        self._heard: WeakValueDictionary[tuple[int, int, int | None], SharedStream]
        self._heard = WeakValueDictionary()
        self._step_count = 0

    def warm_up(self) -> None:
        """Run everything once, since first uses are slow."""
        cutter = WindowCutter(self._detector)
        noise = np.random.default_rng(0).normal(0, 1000, 16_000).astype(np.int16)
        for _ in (*cutter.feed(noise), *cutter.finish()):
            pass

    def run(self) -> None:
        self._connection.send_bytes(pack(Ready()))
        while True:
            upload = self._next_upload()
            try:
                while self._connection.poll(None if upload is None else 0.0):
                    self._obey(unpack_command(self._connection.recv_bytes()))
                    upload = self._next_upload()
            except EOFError:
                return
            if upload is not None:
                self._step(upload)

    def _next_upload(self) -> Upload | None:
        ready = [upload for upload in self._uploads.values() if upload.credit > 0]
        if self._step_count % OLDEST_EVERY == 0:
            return min(ready, key=lambda upload: upload.last_step, default=None)
        return min(ready, key=lambda upload: upload.busy_s, default=None)

    def _obey(self, command: Command) -> None:
        match command:
            case OpenUpload(upload_id):
                upload = Upload(upload_id, self._steps_of(command), command.credit, command.skip)
                self._uploads[upload_id] = upload
                upload.max_step_s = self._limits.max_busy_s
                # A search with a large network may take hours. The request's deadline ends it.
                if command.speakers is None:
                    upload.max_busy_s = self._limits.max_busy_s
                    upload.max_step_s = min(MAX_STEP_S, upload.max_busy_s)
            case Order("credit", upload_id) if upload_id in self._uploads:
                self._uploads[upload_id].credit += 1
            case Order("cancel", upload_id) if upload_id in self._uploads:
                self._drop(self._uploads[upload_id])

    def _steps_of(self, command: OpenUpload) -> Steps:
        path, limits = Path(command.path), self._limits
        if command.survey:
            return survey(path, limits)
        if command.n_mels is not None:
            return transcode(path, limits, Pieces(), MelPeak(command.n_mels), command.channel)
        shared = self._shared(path, command.channel)
        if command.speakers is not None:
            assert self._network is not None, "the router asks only where there is one"
            voices = Voices(self._detector, self._network, limits)
            return voices.turns_of(path, command.speakers, shared)
        cutter = make_cutter(self._detector, command.chunking, shared)
        return transcode(path, limits, cutter, channel=command.channel)

    def _shared(self, path: Path, channel: int | None) -> SharedStream:
        """The detector's pass over this audio, shared with other uploads of the file."""
        try:
            file = path.stat()
        except OSError:  # reported when the file is opened
            return SharedStream(self._detector)
        audio = file.st_dev, file.st_ino, channel
        if (shared := self._heard.get(audio)) is None:
            shared = self._heard[audio] = SharedStream(self._detector)
        return shared

    def _step(self, upload: Upload) -> None:
        self._step_count += 1
        upload.last_step = self._step_count
        self._slot.set(upload.id)
        # The system ends this process by SIGPROF when the time is over.
        signal.setitimer(signal.ITIMER_PROF, upload.max_step_s)
        began_s = time.thread_time()
        result: Opened | Window | Finished | Failed | None
        try:
            result = next(upload.steps)
        except SplitscribeError as error:
            result = Failed.of(error)
        except MemoryError:
            # The allocator keeps the memory, which would fail other uploads, so exit.
            self._report(upload, Failed.of(self._limits.too_big()))
            sys.exit(0)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]
            result = Failed.of(WorkerError(message))
        upload.busy_s += time.thread_time() - began_s
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self._slot.set(0)
        if not isinstance(result, Failed) and upload.busy_s > upload.max_busy_s:
            result = Failed.of(self._limits.too_slow())
        if isinstance(result, Window):
            self._send_window(upload, result)
        elif result is not None:
            self._report(upload, result)
        if isinstance(result, Finished | Failed):
            self._drop(upload)

    def _send_window(self, upload: Upload, window: Window) -> None:
        if upload.skip > 0:
            upload.skip -= 1
            return
        upload.credit -= 1
        found = WindowFound(window.index, window.start_sample, window.is_faint, window.speech)
        self._report(upload, found, window.pcm.data.cast("B"))

    def _report(self, upload: Upload, event: UploadEvent, pcm: memoryview | None = None) -> None:
        self._connection.send_bytes(pack(UploadReport(upload.id, upload.busy_s, event)))
        if pcm is not None:
            self._connection.send_bytes(pcm)

    def _drop(self, upload: Upload) -> None:
        del self._uploads[upload.id]
        upload.steps.close()


def transcode(
    path: Path,
    limits: AudioLimits,
    cutter: WindowCutter | Pieces,
    peak: MelPeak | None = None,
    channel: int | None = None,
) -> Steps:
    """Yield `Opened`, the windows, `Finished`, and None after steps without a window."""
    with closing(AudioFile(path, limits)) as file:
        yield Opened(file.declared_s)
        for pcm in file.blocks(channel):
            if peak is not None:
                peak.feed(pcm)
            yield from cutter.feed(pcm)
            yield None
        yield from cutter.finish()
        yield Finished(cutter.n_samples, 0.0 if peak is None else peak.finish())


def survey(path: Path, limits: AudioLimits) -> Steps:
    """Compare an upload's channels. Yields `Opened`, None between steps, `Finished`."""
    with closing(AudioFile(path, limits)) as file:
        yield Opened(file.declared_s)
        found = ChannelSurvey()
        for frame in file.frames():
            if found.feed(frame):
                yield None
        channels = found.finish()
        yield Finished(round(found.seconds * SAMPLE_RATE), channels=channels)


def make_cutter(
    detector: SpeechDetector,
    chunking: Chunking | None,
    shared: SharedStream | None = None,
) -> WindowCutter:
    """A pause lasts `silence_duration_ms` at least. `prefix_padding_ms` of it are kept."""
    if chunking is None:
        return WindowCutter(detector, shared=shared)
    usual, threshold = CutOptions(), chunking.threshold
    padding_s = chunking.prefix_padding_ms / 1000
    pause_s = chunking.silence_duration_ms / 1000
    options = replace(
        usual,
        pad_before_s=padding_s,
        max_lead_s=padding_s + (usual.max_lead_s - usual.pad_before_s),
        min_pause_s=max(0.0, pause_s - FRAME_GRID_S),
    )
    vad = replace(detector.options, threshold=threshold, release=threshold / 3)
    return WindowCutter(detector, options, vad, shared)


class MelPeak:
    """The largest log10 mel power of a whole recording, found while it is decoded.

    openai/whisper clips a file's log-mel 8 decades below it. Frames are of a centred STFT, which is
    computed by numpy, since audio workers run without torch.
    """

    def __init__(self, n_mels: int) -> None:
        ensure_jit_cache()  # librosa may be needed
        self._filters = mel_filters(n_mels).T  # [201, n_mels]
        turn = 2 * np.pi * np.arange(N_FFT) / N_FFT
        self._hann = (0.5 - 0.5 * np.cos(turn)).astype(np.float32)
        self._pending: NDArray[np.float32] = np.empty(0, np.float32)  # needed by later frames
        self._has_begun = False
        self._power = 0.0

    def feed(self, pcm: Pcm) -> None:
        self._take(pcm.astype(np.float32) / np.float32(32_768))

    def finish(self) -> float:
        self._take(np.zeros(N_FFT, np.float32))
        return math.log10(max(self._power, MEL_FLOOR))

    def _take(self, samples: NDArray[np.float32]) -> None:
        self._pending = np.concatenate((self._pending, samples))
        if not self._has_begun:
            if self._pending.shape[0] <= HALF_FFT:
                return
            reflected = self._pending[HALF_FFT:0:-1]  # padding of a centred STFT
            self._pending = np.concatenate((reflected, self._pending))
            self._has_begun = True
        if self._pending.shape[0] >= N_FFT:
            self._scan()

    def _scan(self) -> None:
        frames = sliding_window_view(self._pending, N_FFT)[::HOP_LENGTH]  # [n, 400]
        spectrum = np.fft.rfft(frames * self._hann)  # [n, 201]
        power = spectrum.real**2 + spectrum.imag**2
        self._power = max(self._power, float((power @ self._filters).max()))
        self._pending = self._pending[frames.shape[0] * HOP_LENGTH :]


def limit_memory(extra_bytes: int) -> None:
    """Let this process allocate `extra_bytes` more than now. Turns core dumps off."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack pages
        limit = pages * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main() -> None:
    """Arguments: descriptors of the socket and the upload slot, and the limits as JSON."""
    socket_fd, slot_fd, limits_json = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router closes the socket instead
    limits = AudioLimits(**json.loads(limits_json))
    worker = AudioWorker(Connection(socket_fd), UploadSlot(slot_fd), limits)
    worker.warm_up()
    if limits.when_idle:  # only now: on a busy machine the start would take long
        run_when_idle()
    else:
        let_encoder_go_first()
    limit_memory(limits.memory_bytes)
    with suppress(BrokenPipeError, ConnectionResetError):  # the router is gone
        worker.run()


if __name__ == "__main__":
    main()
