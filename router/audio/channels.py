"""Extracts single channels of a file, and finds those that are silent or equal to another.

Two channels are equal if one is the other with a constant gain, apart from the noise of a lossy
codec: in every half second that is loud enough, their difference must be far below both. A channel
that never rises above the noise of G.711's zero is silent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from av.audio.frame import AudioFrame
from numpy.typing import NDArray

from cluster.common.errors import InvalidAudioError, InvalidRequestError

CHANNELS_FIELD = "channels"
BLOCK_S = 0.5
SILENT_PEAK = 16 / 32_768  # G.711's smallest steps are 8
# Least mean square of a block that counts: 30 dB below the loudest, within -69 and -54 dB.
LOUD_SHARE, LEAST_LOUD, MOST_LOUD = 1e-3, (12 / 32_768) ** 2, (64 / 32_768) ** 2
LEFT = 0.05  # energy by which equal channels may differ: -13 dB, as of mp3 with few bits


def planes_of(frame: AudioFrame) -> NDArray[Any]:
    """The frame's unscaled samples, [n_channels, n]."""
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    return samples


def scaled(samples: NDArray[Any], kind: np.dtype[Any]) -> NDArray[np.float32]:
    """Scale samples of type `kind`, or their means, to the range from -1 to 1."""
    if kind == np.uint8:
        return ((samples - np.float32(128)) / np.float32(128)).astype(np.float32)
    full = float(1 << 8 * kind.itemsize - 1) if kind.kind == "i" else 1.0
    return (samples / np.float32(full)).astype(np.float32)


def one_channel(frame: AudioFrame, channel: int) -> AudioFrame:
    """The channel as a mono frame of the same number type. Raises InvalidAudioError."""
    planes = planes_of(frame)
    if channel >= planes.shape[0]:
        raise changed()
    plain = frame.format.packed.name
    samples = np.ascontiguousarray(planes[channel : channel + 1])
    mono = AudioFrame.from_ndarray(samples, format=plain, layout="mono")
    mono.sample_rate = frame.sample_rate
    return mono


def changed() -> InvalidAudioError:
    return InvalidAudioError("The number of channels changes within the file.", param="file")


class ChannelSurvey:
    """Compares the channels of a whole file, fed frame by frame."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._n_channels = 0
        self._block: list[NDArray[np.float32]] = []
        self._block_s = 0.0
        # The first block broadcasts these to the number of channels.
        self._peaks: NDArray[np.float32] = np.zeros(1, np.float32)
        self._loudest: NDArray[np.float64] = np.zeros(1)  # mean squares of blocks
        # [j, i]: mean square of the loudest block of channel j that differs from channel i.
        self._unlike: NDArray[np.float64] = np.zeros((1, 1))
        self._products: NDArray[np.float64] = np.zeros((1, 1))  # summed over blocks

    def feed(self, frame: AudioFrame) -> bool:
        """Returns whether a block is complete. Raises InvalidAudioError if the number of channels
        changes, and InvalidRequestError if it is one.
        """
        planes = planes_of(frame)
        n_channels = planes.shape[0]
        if n_channels == 1:
            raise InvalidRequestError(
                "The file has one channel: leave 'channels' out, or send 'mix'.",
                param=CHANNELS_FIELD,
                code="single_channel",
            )
        if self._n_channels not in (0, n_channels):
            raise changed()
        self._n_channels = n_channels
        self._block.append(scaled(planes, planes.dtype))
        self._block_s += frame.samples / frame.sample_rate
        if self._block_s < BLOCK_S:
            return False
        self._close()
        return True

    def finish(self) -> tuple[int | None, ...]:
        """For each channel the first one equal to it, maybe itself; None: silent."""
        if self._block:
            self._close()
        heard = self._peaks > SILENT_PEAK
        least = np.clip(LOUD_SHARE * self._loudest, LEAST_LOUD, MOST_LOUD)
        tells = self._unlike > least[:, None]
        same = ~(tells | tells.T) & heard & (self._loudest > LEAST_LOUD)
        return tuple(
            int(np.flatnonzero([*same[c, :c], True])[0]) if heard[c] else None
            for c in range(self._n_channels)
        )

    def _close(self) -> None:
        block = np.concatenate(self._block, axis=1)
        self._block.clear()
        self.seconds += self._block_s
        self._block_s = 0.0
        self._peaks = np.maximum(self._peaks, np.abs(block).max(axis=1))
        products = (block @ block.T).astype(np.float64)  # [n_channels, n_channels]
        powers = products.diagonal()
        squares = powers / block.shape[1]
        self._loudest = np.maximum(self._loudest, squares)
        self._products = self._products + products
        totals = self._products.diagonal()
        gains = self._products / np.maximum(totals, 1e-12)  # [j, i]: from i to j
        of_others = gains**2 * powers  # energy of channel j as predicted from i
        left = powers[:, None] - 2 * gains * products + of_others
        limit = LEFT * np.maximum(powers[:, None], of_others)
        unlike = left > limit
        unlike |= unlike.T  # in either direction
        self._unlike = np.maximum(self._unlike, unlike * squares[:, None])
