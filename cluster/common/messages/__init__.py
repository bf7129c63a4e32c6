"""Every dataclass that crosses a process boundary. No torch, no behaviour beyond checks.

`audio` says how audio is counted, `encode` what goes to an encoder and comes back, `decode` the
same of a decoder, and `load` what workers report of themselves; `shared` holds what several need.
Import the names from here. Times that cross hosts are remaining seconds: each receiver turns them
into a deadline on its own monotonic clock on arrival.
"""

from __future__ import annotations

from cluster.common.messages.audio import (
    FRAMES_PER_S,
    HOP_LENGTH,
    MEL_CONTEXT_SAMPLES,
    SAMPLE_RATE,
    WINDOW_FRAMES,
    WINDOW_POSITIONS,
    WINDOW_S,
    WINDOW_SAMPLES,
    FileMel,
    Pcm,
)
from cluster.common.messages.decode import (
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    DecodeTimings,
    OnToken,
    QualityGates,
    SampledToken,
    TokenAlignment,
)
from cluster.common.messages.encode import CrossKVHandle, EncodeReply, EncodeRequest, EncodeTimings
from cluster.common.messages.load import (
    NO_SLACK_S,
    UNREAD,
    DecoderSignals,
    EncoderSignals,
    WorkerLoad,
    WorkerStatus,
)
from cluster.common.messages.shared import (
    ROLES,
    FinishReason,
    Location,
    Payload,
    Priority,
    Role,
    Task,
)

__all__ = [
    "SAMPLE_RATE",
    "WINDOW_S",
    "WINDOW_SAMPLES",
    "HOP_LENGTH",
    "FRAMES_PER_S",
    "WINDOW_FRAMES",
    "WINDOW_POSITIONS",
    "MEL_CONTEXT_SAMPLES",
    "NO_SLACK_S",
    "UNREAD",
    "Pcm",
    "Role",
    "ROLES",
    "Task",
    "FinishReason",
    "Payload",
    "Priority",
    "FileMel",
    "EncodeRequest",
    "CrossKVHandle",
    "EncodeTimings",
    "Location",
    "EncodeReply",
    "QualityGates",
    "DecodeOptions",
    "DecodeRequest",
    "DecodeTimings",
    "SampledToken",
    "OnToken",
    "TokenAlignment",
    "DecodeResult",
    "WorkerStatus",
    "WorkerLoad",
    "EncoderSignals",
    "DecoderSignals",
]
