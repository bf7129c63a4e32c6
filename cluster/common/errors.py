"""Every error that splitscribe raises on purpose, with the HTTP answer it becomes.

    SplitscribeError                      500
    ├── InvalidRequestError               400   the caller's mistake
    │   ├── InvalidAudioError             400   not audio, truncated, no sound, over a limit
    │   ├── AudioTooShortError            400
    │   └── UnsupportedValueError         400   a field or value that this server does not offer
    ├── AuthenticationError               401
    ├── NotFoundError                     404   no such file or batch, or it is another key's
    ├── ModelNotFoundError                404
    ├── ConflictError                     409   not possible in the object's present state
    ├── PayloadTooLargeError              413
    ├── RateLimitError                    429   this client's own limit; with Retry-After
    │   └── QuotaExceededError            429   its share of a day is used up
    ├── OverloadedError                   503   with Retry-After
    │   └── CrowdedError                  429   more than the workers can do in time
    ├── InsufficientStorageError          507   the volume is full, or a key's share of it
    ├── DeadlineExceededError             504
    ├── ConfigurationError                500   raised at start: settings, checkpoint, platform
    │   └── CheckpointError               500
    └── WorkerError                       500   inside the cluster; the pipeline may try again
        ├── KVLostError                         the published KV is gone: encode again
        │   ├── StaleGenerationError            its pages were reused before or during the READ
        │   ├── PeerLostError                   the peer died, or the connection to it did
        │   └── TransferTimeoutError            the READ did not end in time
        ├── HandleRefusedError                  bad signature or not our handle: never retried
        │   └── LayoutMismatchError             from other settings or another version: encode again
        ├── WorkerDrainingError                 the replica takes no new work: ask another
        ├── WorkerGoneError                     the replica died or cannot be reached
        │   └── WorkerDiedError                 it died while it had the window
        ├── WindowRefusedError                  its audio ended workers: it gets no further one
        └── SequenceFailedError                 this sequence alone failed

`router.http.envelope` alone turns an error into an answer. Errors can be pickled, since they cross
processes through Ray.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar


class SplitscribeError(Exception):
    """`status`, `type`, `code` and `param` are the fields of OpenAI's error envelope."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    should_retry: ClassVar[bool | None] = None  # the `x-should-retry` header; None: no header

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,  # the `Retry-After` header
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        fields: dict[str, Any] = {
            "param": self.param,
            "code": self.code,
            "retry_after_s": self.retry_after_s,
        }
        return partial(type(self), self.message, **fields), ()


class InvalidRequestError(SplitscribeError):
    status = 400
    type = "invalid_request_error"
    should_retry = False


class InvalidAudioError(InvalidRequestError):
    pass


class AudioTooShortError(InvalidRequestError):
    default_code = "audio_too_short"


class UnsupportedValueError(InvalidRequestError):
    default_code = "unsupported_value"


class AuthenticationError(SplitscribeError):
    status = 401
    type = "invalid_request_error"
    default_code = "invalid_api_key"
    should_retry = False


class NotFoundError(SplitscribeError):
    status = 404
    type = "invalid_request_error"
    default_code = "not_found"
    should_retry = False


class ModelNotFoundError(SplitscribeError):
    status = 404
    type = "invalid_request_error"
    default_code = "model_not_found"
    should_retry = False


class ConflictError(SplitscribeError):
    status = 409
    type = "invalid_request_error"
    should_retry = False


class PayloadTooLargeError(SplitscribeError):
    status = 413
    should_retry = False


class RateLimitError(SplitscribeError):
    status = 429
    type = "requests"
    default_code = "rate_limit_exceeded"
    should_retry = True


class QuotaExceededError(RateLimitError):
    type = "insufficient_quota"
    default_code = "insufficient_quota"
    should_retry = False


class OverloadedError(SplitscribeError):
    status = 503
    should_retry = True


class CrowdedError(OverloadedError):
    status = 429
    type = "requests"
    default_code = "overloaded"


class InsufficientStorageError(SplitscribeError):
    status = 507
    default_code = "insufficient_storage"
    should_retry = False


class DeadlineExceededError(SplitscribeError):
    status = 504
    default_code = "deadline_exceeded"
    should_retry = False  # two more tries of this length would only triple the load


class ConfigurationError(SplitscribeError):
    should_retry = False


class CheckpointError(ConfigurationError):
    pass


class WorkerError(SplitscribeError):
    pass


class KVLostError(WorkerError):
    pass


class StaleGenerationError(KVLostError):
    pass


class PeerLostError(KVLostError):
    pass


class TransferTimeoutError(KVLostError):
    """The READ's target pages are quarantined until it ends."""


class HandleRefusedError(WorkerError):
    should_retry: ClassVar[bool | None] = False


class LayoutMismatchError(HandleRefusedError):
    should_retry = None


class WorkerDrainingError(WorkerError):
    pass


class WorkerGoneError(WorkerError):
    pass


class WorkerDiedError(WorkerGoneError):
    pass


class WindowRefusedError(WorkerError):
    should_retry: ClassVar[bool | None] = False
    default_code = "window_refused"


class SequenceFailedError(WorkerError):
    pass
