"""Answer a request with a stream of OpenAI's events, which hold final text only.

The 200 is sent when the first audio was decoded, so that a bad upload still gets its own status. A
later failure is an event with an error, which ends the stream.
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
    worded_bodies,
)
from router.api.params import TranscriptionParams
from router.api.responses import error_body
from router.http.envelope import UnexpectedError, note_error
from router.interface import AudioShare, StageTimings, TranscriptionResult, Update
from router.transcript import TokenLogprob

logger = logging.getLogger(__name__)

HEARTBEAT_S = 15.0  # proxies cut a connection that is silent for 30 to 60 s
OPENING_S = 5.0  # after the container's length is known, the 200 is sent without audio
HEARTBEAT = b": still working\n\n"
END = b"data: [DONE]\n\n"
TellTiming = Callable[[StageTimings], str]
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
# Some clients' line readers take these for line breaks.
_ESCAPES = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


class EventWriter:
    def __init__(self, params: TranscriptionParams, tell_timing: TellTiming) -> None:
        self._params = params
        self._tell_timing = tell_timing
        self._n_cues = 0
        self._logprobs: list[TokenLogprob] = []
        self._n_tokens = 0  # of the segments that closed

    def delta(self, update: Update) -> bytes | None:
        """The events of an update; None if the format needs none for it."""
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
                bodies = worded_bodies if self._params.words else segment_bodies
                event["segments"] = bodies(update.segments)
            case "json" if self._params.logprobs and update.logprobs:
                event["logprobs"] = logprob_bodies(update.logprobs)
        self._n_tokens += sum(len(segment.tokens) for segment in update.segments)
        if not event["delta"] and len(event) == 2:
            return None
        return _event(event | self._chunk(event["delta"]))

    def _chunk(self, text: str) -> dict[str, Any]:
        """The fields that vLLM's clients read. Tokens are counted when their segment closes."""
        if not self._params.stream_include_usage:
            return {}
        chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": text}}]}
        if self._params.stream_continuous_usage_stats:
            chunk["usage"] = {"completion_tokens": self._n_tokens}
        return chunk

    def done(self, result: TranscriptionResult) -> bytes:
        """The last events. Without cues, they still include the header of a subtitle file."""
        transcript, params = result.transcript, self._params
        rest = b""
        match params.response_format:
            case "srt" | "vtt" as subtitle_format:
                text = subtitles(transcript.segments, subtitle_format)
                body: dict[str, Any] = {"text": text}
                if text and not self._n_cues:
                    delta = {"type": "transcript.text.delta", "delta": text}
                    rest = _event(delta | self._chunk(text))
            case "diarized_json":  # as in OpenAI's streams, the text has no names
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
    """The answer to a streamed request, and the `AudioShare` of its work. It does not read
    `receive`, where the work listens for the client's hang-up.
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
        # Lines are comments; None: the work has ended.
        self._updates: asyncio.Queue[Update | bytes | None] = asyncio.Queue()
        self._opened = asyncio.Event()  # the 200 may be sent
        self._stack = AsyncExitStack()
        self._task: asyncio.Future[TranscriptionResult] | None = None
        self._error: SplitscribeError | None = None  # what ended the stream after the 200

    def expect(self, audio_s: float) -> None:
        """Note the container's length, which may be wrong. A long file may take long to decode."""
        self._share.expect(audio_s)
        asyncio.get_running_loop().call_later(OPENING_S, self._opened.set)

    def found(self, audio_s: float) -> None:
        self._share.found(audio_s)
        self._opened.set()

    def update(self, update: Update) -> None:
        self._updates.put_nowait(update)
        self._opened.set()

    def progress(self, done_s: float, known_s: float) -> None:
        """Tell how much audio is done, in a comment that events' readers skip."""
        self._updates.put_nowait(f": {done_s:.1f} of {known_s:.1f} s\n\n".encode())

    async def begin(
        self, work: Coroutine[Any, Any, TranscriptionResult], stack: AsyncExitStack
    ) -> None:
        """Start the work, and wait until the 200 may be sent. Then take over `stack`, which is
        closed when the work ends. Raises what `work` raises before.
        """
        self._task = asyncio.ensure_future(self._run(work))
        self._task.add_done_callback(self._ended)
        try:
            await self._opened.wait()
        except BaseException:
            await self._close()
            raise
        if self._task.done():
            self._task.result()
        # No await from here until Starlette calls the answer, so the stack always has an owner.
        self._stack = stack.pop_all()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)
        except OSError:  # some servers raise it when the client hangs up
            logger.info("the client hung up")
        finally:
            if self._error is not None:
                note_error(scope, self._error)
            await self._close()

    async def _events(self) -> AsyncIterator[bytes]:
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
                if event := update if isinstance(update, bytes) else self._writer.delta(update):
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
