"""How many of its positions an encoder computes for a window: all, or the audio's and some slack.

Whisper was trained on 30 s, so most of what it computes for a short clip is padding. A checkpoint
that was tuned for it says so in `encoder_context.json`; for any other a person may turn it on. The
length is a function of the window alone, so that no text depends on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.common.errors import CheckpointError
from cluster.common.messages import FRAMES_PER_S, HOP_LENGTH, WINDOW_S
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.tensor_files import read_json
from cluster.common.settings import EncoderSettings

FILE = "encoder_context.json"
FULL = 0  # of a request: all positions that the checkpoint has
MEL_PER_POSITION = 2  # mel frames of 10 ms in a position of 20 ms
SAMPLES_PER_POSITION = MEL_PER_POSITION * HOP_LENGTH

# The lengths that there are below the full one, in positions: few, so that windows share batches
# and a GPU has a graph for each; multiples of 64, which suit the products and attention kernels of
# both devices; and close together where windows are short, so that rounding up costs at most a
# quarter. All exceed a GPU's page (125), so that a page is a whole window or a part of each.
LENGTHS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280)

# For weights that nobody tuned: word error rates rise with less slack and with longer content.
UNTUNED_SLACK = 128
UNTUNED_MAX_CONTENT_S = 8.0


@dataclass(frozen=True, slots=True)
class EncoderContext:
    """slack: positions of 20 ms behind the content, at least; longer content gets all positions."""

    slack: int = UNTUNED_SLACK
    max_content_s: float = UNTUNED_MAX_CONTENT_S

    def positions_for(self, content_frames: int, n_audio_ctx: int) -> int:
        """One of `LENGTHS`, or FULL (0), for so many mel frames that are audio and not padding.

        Example: 5 s are 500 mel frames or 250 positions; with a slack of 64 that makes 314, and the
        next length is 320.
        """
        if content_frames > self.max_content_s * FRAMES_PER_S:
            return FULL
        least = positions_of(content_frames) + self.slack
        return next((n for n in LENGTHS if least <= n < n_audio_ctx), FULL)

    def lengths(self, n_audio_ctx: int) -> tuple[int, ...]:
        """All that `positions_for` gives below the full length, the shortest first."""
        contents = range(round(self.max_content_s * FRAMES_PER_S) + 1)
        found = {self.positions_for(frames, n_audio_ctx) for frames in contents}
        return tuple(sorted(found - {FULL}))


def positions_of(content_frames: int) -> int:
    return -(-content_frames // MEL_PER_POSITION)


def read_context(folder: Path) -> EncoderContext | None:
    """What a checkpoint was tuned for: {"slack": 64, "max_content_s": 30.0}; None without a file.

    Raises CheckpointError where the file is not like that.
    """
    if (content := read_json(file := folder / FILE)) is None:
        return None
    expected = {"slack", "max_content_s"}
    if content.keys() != expected:
        raise CheckpointError(f"{file} must be an object of {' and '.join(sorted(expected))}")
    slack, max_content_s = content["slack"], content["max_content_s"]
    if type(slack) is not int or slack < 0:
        raise CheckpointError(f"{file}: slack is a number of positions from 0 on, not {slack!r}")
    if type(max_content_s) not in (int, float) or not 0 < max_content_s <= WINDOW_S:
        raise CheckpointError(
            f"{file}: max_content_s is a number of seconds up to {WINDOW_S}, not {max_content_s!r}"
        )
    return EncoderContext(slack, float(max_content_s))


def chosen_context(checkpoint: Checkpoint, settings: EncoderSettings) -> EncoderContext | None:
    """None where every window gets all positions; raises as `read_context`."""
    if settings.context == "full":
        return None
    declared = read_context(checkpoint.path)
    if declared is None and settings.context == "auto":
        return None
    usual = declared or EncoderContext()
    slack, max_s = settings.context_slack, settings.context_max_s
    return EncoderContext(
        usual.slack if slack is None else slack, usual.max_content_s if max_s is None else max_s
    )


def unused_settings(settings: EncoderSettings, rule: EncoderContext | None) -> tuple[str, ...]:
    """Settings of trimmed windows that were given where `chosen_context` trims none, by name."""
    if rule is not None or settings.context == "full":  # `full` takes them back on purpose
        return ()
    given = {"context_slack": settings.context_slack, "context_max_s": settings.context_max_s}
    return tuple(f"encoder.{name}" for name, value in given.items() if value is not None)
