"""A lane: one queue of windows and the loop that encodes them. An engine has one lane, or two.

On a CPU bulk windows have a lane of their own, whose threads run only while no other thread wants
their core. So an interactive window waits for no bulk window, however long that one is: the
operating system takes the core from one and gives it to the other. A GPU has one lane, where the
queue decides which class goes next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from encoder_worker.batcher import Batcher
from encoder_worker.loop import EncodeLoop


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class Lane:
    """begin: called before a window is put into the queue, so that its loop runs; idempotent."""

    batcher: Batcher
    loop: EncodeLoop
    begin: Callable[[], None] = field(default=_nothing)
