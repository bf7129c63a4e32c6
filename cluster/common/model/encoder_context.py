"""Choose how many positions an encoder computes for a window: all, or the audio's and some slack.

Most of a short clip's window is padding. A checkpoint that was tuned for fewer positions has a file
`encoder_context.json`. The length depends on the window alone, not on others of its batch.
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
FULL = 0  # stands for all positions of the checkpoint
MEL_PER_POSITION = 2  # mel frames of 10 ms in a position of 20 ms
SAMPLES_PER_POSITION = MEL_PER_POSITION * HOP_LENGTH

# The lengths below the full one, in positions. They are few, so that windows share batches and a
# GPU has a graph for each. They are multiples of 64, which suit the products and attention kernels
# of both devices. Short ones lie close together, so that rounding up costs at most a quarter. All
# exceed a GPU's page (125), so that every window fills at least one page.
LENGTHS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280)

# For weights that were not tuned: less slack or longer content makes more word errors.
UNTUNED_SLACK = 128
UNTUNED_MAX_CONTENT_S = 8.0


@dataclass(frozen=True, slots=True)
class EncoderContext:
    """`slack` is the least number of positions (20 ms each) after the content. Content that is
    longer than `max_content_s` gets all positions.
    """

    slack: int = UNTUNED_SLACK
    max_content_s: float = UNTUNED_MAX_CONTENT_S

    def positions_for(self, content_frames: int, n_audio_ctx: int) -> int:
        """Return one of `LENGTHS`, or FULL, for a window with so many mel frames of audio.

        Example: 5 s are 500 mel frames or 250 positions; with a slack of 64 that makes 314, and the
        next length is 320.
        """
        if content_frames > self.max_content_s * FRAMES_PER_S:
            return FULL
        least = positions_of(content_frames) + self.slack
        return next((n for n in LENGTHS if least <= n < n_audio_ctx), FULL)

    def lengths(self, n_audio_ctx: int) -> tuple[int, ...]:
        contents = range(round(self.max_content_s * FRAMES_PER_S) + 1)
        found = {self.positions_for(frames, n_audio_ctx) for frames in contents}
        return tuple(sorted(found - {FULL}))


def positions_of(content_frames: int) -> int:
    return -(-content_frames // MEL_PER_POSITION)


def read_context(folder: Path) -> EncoderContext | None:
    """Read what a checkpoint was tuned for, {"slack": 64, "max_content_s": 30.0}; None without the
    file. Raises CheckpointError if the file is malformed.
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
    """Return None if every window gets all positions. Raises as `read_context` does."""
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
    if rule is not None or settings.context == "full":  # `full` overrides them on purpose
        return ()
    given = {"context_slack": settings.context_slack, "context_max_s": settings.context_max_s}
    return tuple(f"encoder.{name}" for name, value in given.items() if value is not None)
