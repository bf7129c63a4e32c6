"""A request that streams: its work runs as a task and sends final text as OpenAI's events.

For srt and vtt a delta is the cues that closed; for diarized_json each segment is an event, and
there are no deltas. A comment keeps proxies from cutting a quiet stream; a failure in the middle is
one event with an error in OpenAI's envelope, then the end. The 200 is sent when the first audio was
found, so that an upload that cannot be opened still gets a status of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.common.errors import SplitscribeError
from cluster.common.logs import current_request_id
from router.api.formats import (
    diarized_bodies,
    document_of,
    logprob_bodies,
    segment_bodies,
    subtitles,
    to_json,
    token_usage,
)
from router.api.params import TranscriptionParams
from router.api.responses import error_body
from router.http.envelope import UnexpectedError, note_error
from router.interface import AudioShare, StageTimings, TranscriptionResult, Update
from router.transcript import TokenLogprob

logger = logging.getLogger(__name__)

HEARTBEAT_S = 15.0  # proxies cut a connection that is silent for 30 to 60 s
OPENING_S = 5.0  # after the container has stated its length; then the 200 is sent without audio
HEARTBEAT = b": still working\n\n"
END = b"data: [DONE]\n\n"
TellTiming = Callable[[StageTimings], str]
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
# Line breaks to some clients' line readers, though not to JSON.
_ESCAPES = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


class EventWriter:
    """In the format that was asked for. tell_timing: for the last event, where the time went."""

    def __init__(self, params: TranscriptionParams, tell_timing: TellTiming) -> None:
        self._params = params
        self._tell_timing = tell_timing
        self._n_cues = 0
        self._logprobs: list[TokenLogprob] = []
        self._n_tokens = 0  # of the segments that closed

    def delta(self, update: Update) -> bytes | None:
        """None when the update holds nothing for this format."""
        self._logprobs.extend(update.logprobs)
        if self._params.response_format == "diarized_json":
            return b"".join(map(_event, diarized_bodies(update.segments))) or None
        event: dict[str, Any] = {"type": "transcript.text.delta", "delta": update.text}
        match self._params.response_format:
            case "srt" | "vtt" as subtitle_format:
                first = self._n_cues + 1
                self._n_cues += len(update.segments)
                segments = update.segments
                event["delta"] = subtitles(segments, subtitle_format, first) if segments else ""
            case "verbose_json" if self._params.segments and update.segments:
                event["segments"] = segment_bodies(update.segments)
            case "json" if self._params.logprobs and update.logprobs:
                event["logprobs"] = logprob_bodies(update.logprobs)
        self._n_tokens += sum(len(segment.tokens) for segment in update.segments)
        if not event["delta"] and len(event) == 2:
            return None
        return _event(event | self._chunk(event["delta"]))

    def _chunk(self, text: str) -> dict[str, Any]:
        """What vLLM's clients read of a delta. Tokens are counted when their segment closes."""
        if not self._params.stream_include_usage:
            return {}
        chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": text}}]}
        if self._params.stream_continuous_usage_stats:
            chunk["usage"] = {"completion_tokens": self._n_tokens}
        return chunk

    def done(self, result: TranscriptionResult) -> bytes:
        """The last events. A subtitle file without a cue still has its header."""
        transcript, params = result.transcript, self._params
        rest = b""
        match params.response_format:
            case "srt" | "vtt" as subtitle_format:
                text = subtitles(transcript.segments, subtitle_format)
                body: dict[str, Any] = {"text": text}
                if text and not self._n_cues:
                    delta = {"type": "transcript.text.delta", "delta": text}
                    rest = _event(delta | self._chunk(text))
            case "diarized_json":  # as OpenAI's ends: without names, as segments had them
                body = {"text": "".join(one.text for one in transcript.segments).strip()}
            case _:
                body = document_of(transcript, params, self._logprobs)
        if params.response_format == "verbose_json":
            body["server_timing"] = self._tell_timing(result.timings)
        body["usage"] = used = token_usage(transcript)
        if params.stream_include_usage:
            used["prompt_tokens"] = used["input_tokens"]
            used["completion_tokens"] = used["output_tokens"]
        return rest + _event({"type": "transcript.text.done", **body}) + END


class EventStream(StreamingResponse):
    """The answer to a streamed request, and its share of the router's audio.

    `begin` starts the work and returns when the 200 may be sent; from then on it owns what must
    live as long as the work. Does not read the channel of hang-ups, on which the work listens.
    """

    def __init__(
        self,
        params: TranscriptionParams,
        share: AudioShare,
        tell_timing: TellTiming,
        headers: dict[str, str],
    ) -> None:
        super().__init__(
            self._events(), media_type="text/event-stream", headers={**HEADERS, **headers}
        )
        self._share = share
        self._writer = EventWriter(params, tell_timing)
        self._updates: asyncio.Queue[Update | None] = asyncio.Queue()  # None: the work has ended
        self._opened = asyncio.Event()  # the 200 may be sent
        self._stack = AsyncExitStack()
        self._task: asyncio.Future[TranscriptionResult] | None = None
        self._error: SplitscribeError | None = None  # what ended it after the 200

    def expect(self, audio_s: float) -> None:
        """The container states this length. It may be wrong, but a long file takes its time."""
        self._share.expect(audio_s)
        asyncio.get_running_loop().call_later(OPENING_S, self._opened.set)

    def found(self, audio_s: float) -> None:
        self._share.found(audio_s)
        self._opened.set()

    def update(self, update: Update) -> None:
        self._updates.put_nowait(update)
        self._opened.set()

    async def begin(
        self, work: Coroutine[Any, Any, TranscriptionResult], stack: AsyncExitStack
    ) -> None:
        """Raises what `work` raised while nothing was sent; else `stack` is the stream's."""
        self._task = asyncio.ensure_future(self._run(work))
        self._task.add_done_callback(self._ended)
        try:
            await self._opened.wait()
        except BaseException:
            await self._close()
            raise
        if self._task.done():
            self._task.result()
        # No await from here to the answer's own: what the stack holds always has an owner.
        self._stack = stack.pop_all()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)
        except OSError:  # how some servers say that the client hung up
            logger.info("the client hung up")
        finally:
            if self._error is not None:
                note_error(scope, self._error)
            await self._close()

    async def _events(self) -> AsyncIterator[bytes]:
        """The body: events until the work has ended, and its outcome."""
        try:
            assert self._task is not None
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        update = await self._updates.get()
                except TimeoutError:
                    yield HEARTBEAT
                    continue
                if update is None:
                    break
                if event := self._writer.delta(update):
                    yield event
            yield self._writer.done(await self._task)
        except ClientDisconnect:
            logger.info("the client hung up in mid-stream")
        except SplitscribeError as error:
            logger.warning("the stream ends with %s: %s", type(error).__name__, error.message)
            self._error = error
            yield _event(error_body(error))
        except Exception:
            logger.exception("the stream ends with a bug")
            self._error = UnexpectedError(current_request_id())
            yield _event(error_body(self._error))

    async def _close(self) -> None:
        """Cancel the work if it still runs, wait for its end, and free what it held."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._release()

    async def _run(self, work: Coroutine[Any, Any, TranscriptionResult]) -> TranscriptionResult:
        try:
            return await work
        finally:
            await self._release()

    async def _release(self) -> None:
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()

    def _ended(self, _: object) -> None:
        self._updates.put_nowait(None)
        self._opened.set()


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {to_json(content).translate(_ESCAPES)}\n\n".encode()
