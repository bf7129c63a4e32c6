"""One realtime WebSocket: carry events between the client, the session's protocol and the engine.

Five tasks read the client, forward the engine's events, send, watch the time limits, and wait for a
restart. The first one to end decides how the connection ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from cluster.common.clock import Clock
from cluster.common.errors import (
    InvalidRequestError,
    SplitscribeError,
    WorkerDrainingError,
    WorkerError,
)
from cluster.common.heap import give_memory_back
from cluster.common.settings import LiveSettings
from router.http.listener import Budget
from router.http.realtime.outbox import Outbox, SlowReaderError
from router.live.protocol.events import (
    Append,
    ClientEvent,
    InvalidEvent,
    read_event,
)
from router.live.protocol.session_protocol import LiveProtocol, TooManyMistakesError

logger = logging.getLogger(__name__)

# Close codes of RFC 6455 and IANA's list.
GOING_AWAY, POLICY_VIOLATION, INTERNAL_ERROR, SERVICE_RESTART = 1001, 1008, 1011, 1012

DRAIN_S = 20.0  # longest wait for open turns, which fail after it
FLUSH_S = 5.0  # longest wait until the last events are sent
CLOSE_S = 5.0
ROOM_TIMEOUT_S = 30.0  # how long the client is not read while too much of its audio waits
ROOM_POLL_S = 0.05
LONG_EVENT = 262_144  # characters; longer events are parsed in a thread
LONG_EVENTS = ThreadPoolExecutor(1, "long-event")  # one at a time, to bound memory
PIECE_S = 10.0  # longest audio that is processed before other tasks get their turn
EVENTS_PER_S, EVENTS_AT_ONCE = 200.0, 2000.0  # of a client; audio in real time is 10 to 100/s


@dataclass(frozen=True, slots=True)
class Ending:
    code: int | None  # of the WebSocket's close; None: the client has left
    reason: str = ""
    error: SplitscribeError | None = None  # sent before the close
    drains: bool = False  # open turns may end first


class TooManyEventsError(InvalidRequestError):
    """The client sends events too fast, and a proxy prevents reading it more slowly."""

    default_code = "too_many_events"


CLIENT_LEFT = Ending(None, "the client left")
DRAINED = Ending(SERVICE_RESTART, "the server restarts; connect again", drains=True)


class RealtimeConnection:
    def __init__(
        self,
        websocket: WebSocket,
        protocol: LiveProtocol,
        settings: LiveSettings,
        clock: Clock,
        *,
        draining: asyncio.Event,
        is_proxied: bool,
    ) -> None:
        """draining: set for a restart: open turns may end, then the connection is closed.

        is_proxied: Ray Serve's proxy queues both directions without a bound, so a client that sends
            too fast is disconnected. Without the proxy it is read more slowly.
        """
        self._websocket = websocket
        self._protocol = protocol
        self._settings = settings
        self._clock = clock
        self._is_proxied = is_proxied
        self._outbox = Outbox(websocket.send_text, clock, is_limited=is_proxied)
        self._started_s = self._last_received_s = clock.monotonic()
        self._events = Budget(EVENTS_PER_S, EVENTS_AT_ONCE)
        self._draining = draining
        self._had_long_event = False

    async def run(self) -> Ending:
        """Serve until one side ends the connection. Closes the engine's session."""
        reading = asyncio.create_task(self._read_client())
        forwarding = asyncio.create_task(self._forward_engine_events())
        sending = asyncio.create_task(self._outbox.run())
        watching = asyncio.create_task(self._watch_time())
        draining = asyncio.create_task(self._wait_for_drain())
        tasks: list[asyncio.Task[Any]] = [reading, forwarding, sending, watching, draining]
        try:
            self._outbox.put(self._protocol.open())
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ending = next(_ending_of(task) for task in tasks if task.done())
            await _cancel([reading, watching, draining])
            return await self._end(ending, forwarding, sending)
        finally:
            await _cancel(tasks)
            for session in (*self._protocol.take_replaced(), self._protocol.session):
                await session.close()
            if self._had_long_event:
                LONG_EVENTS.submit(give_memory_back)

    async def _read_client(self) -> Ending:
        try:
            while True:
                event = await self._next_event()
                if event is None:
                    return CLIENT_LEFT
                for piece in _pieces(event, self._protocol.audio_s(event)):
                    await self._wait_for_room(self._protocol.audio_s(piece))
                    self._outbox.put(self._protocol.receive(piece))
                    await self._clock.sleep(0.0)  # lets other tasks run
                for replaced in self._protocol.take_replaced():
                    await replaced.close()
        except TooManyMistakesError as error:
            return Ending(POLICY_VIOLATION, "too many wrong events", error)
        except TooManyEventsError as error:
            return Ending(POLICY_VIOLATION, "too many events", error)
        except InvalidRequestError as error:  # from `_wait_for_room`
            return Ending(POLICY_VIOLATION, "too much audio waits", error)

    async def _next_event(self) -> ClientEvent | None:
        """The client's next event; None when it has left."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        self._last_received_s = self._clock.monotonic()
        await self._wait_for_budget()
        text = message.get("text")
        return await self._parsed(message.get("bytes") if text is None else text)

    async def _wait_for_budget(self) -> None:
        """Let other tasks run, and wait if the client sends too fast. Behind a proxy, which would
        queue what is not read, raise TooManyEventsError instead.
        """
        owed_s = self._events.spend(1, self._clock.monotonic())
        if owed_s and self._is_proxied:
            raise TooManyEventsError(
                f"You sent more than {EVENTS_PER_S:.0f} events a second. Send audio in longer "
                f"pieces."
            )
        await self._clock.sleep(owed_s)

    async def _parsed(self, sent: str | bytes | None) -> ClientEvent:
        length = 0 if sent is None else len(sent)
        self._had_long_event |= length > LONG_EVENT
        limit = self._settings.max_event_bytes
        if length > limit:
            message = (
                f"The event has {length} bytes; at most {limit} are allowed. Send audio in pieces."
            )
            return InvalidEvent(None, InvalidRequestError(message, code="event_too_large"))
        if length > LONG_EVENT:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(LONG_EVENTS, read_event, sent)
        return read_event(sent)

    async def _wait_for_room(self, audio_s: float) -> None:
        """Wait until the session may take more audio. Raises InvalidRequestError after a while."""
        limit = self._settings.max_unsent_s
        patience_s = 0.0 if self._is_proxied else ROOM_TIMEOUT_S
        asked_s = self._clock.monotonic()
        while audio_s and (unsent_s := self._protocol.unsent_s) and unsent_s + audio_s > limit:
            if self._clock.monotonic() - asked_s >= patience_s:
                raise InvalidRequestError(
                    f"{unsent_s:.0f} s of audio wait to be transcribed; at most {limit:.0f} s are "
                    f"allowed. Send audio more slowly.",
                    code="input_audio_buffer_full",
                )
            await self._clock.sleep(ROOM_POLL_S)
            self._last_received_s = self._clock.monotonic()  # not idle: it is not being read

    async def _forward_engine_events(self) -> Ending:
        while True:
            session = self._protocol.session
            async for event in session.events():
                self._outbox.put(self._protocol.on_engine_event(event))
            if session is self._protocol.session:
                return Ending(
                    INTERNAL_ERROR, "the session ended", WorkerError("the session has ended")
                )

    async def _watch_time(self) -> Ending:
        limits = self._settings
        end_s = self._started_s + limits.max_session_s
        while True:
            now_s = self._clock.monotonic()
            idle_end_s = self._last_received_s + limits.idle_timeout_s
            if now_s >= end_s:
                return _expired(f"Your session hit the maximum duration of {_time(limits)}.")
            if now_s >= idle_end_s:
                return _expired(
                    f"You have sent nothing for {limits.idle_timeout_s:.0f} s.", "session_idle"
                )
            await self._clock.sleep(max(0.001, min(end_s, idle_end_s) - now_s))

    async def _wait_for_drain(self) -> Ending:
        await self._draining.wait()
        return DRAINED

    async def _end(
        self, ending: Ending, forwarding: asyncio.Task[Ending], sending: asyncio.Task[None]
    ) -> Ending:
        if ending.code is None:
            return ending
        try:
            if ending.drains and not forwarding.done():
                await self._drain_turns(forwarding)
            await _cancel([forwarding])
            self._outbox.put(self._protocol.fail_open_items(_left_over(ending)))
            if ending.error is not None:
                self._outbox.put([self._protocol.writer.error(ending.error)])
            flushing = asyncio.ensure_future(self._outbox.sent())
            await asyncio.wait(
                {flushing, sending}, timeout=FLUSH_S, return_when=asyncio.FIRST_COMPLETED
            )
            flushing.cancel()
        except SlowReaderError:
            pass  # the client does not read: only the close may still reach it
        await _cancel([sending])
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._websocket.close(ending.code, ending.reason)
        except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            pass  # the client has gone
        return ending

    async def _drain_turns(self, forwarding: asyncio.Task[Ending]) -> None:
        draining = asyncio.ensure_future(self._protocol.session.drain())
        try:
            async with asyncio.timeout(DRAIN_S):
                await asyncio.wait({forwarding})
        except TimeoutError:
            logger.warning("a realtime session's turns did not end within %.0f s", DRAIN_S)
        finally:
            await _cancel([draining])


def _pieces(event: ClientEvent, audio_s: float) -> Iterator[ClientEvent]:
    """`event`, or its audio in pieces of at most `PIECE_S` seconds."""
    if not isinstance(event, Append) or audio_s <= PIECE_S:
        yield event
        return
    size = round(len(event.audio) * PIECE_S / audio_s) & ~1
    for start in range(0, len(event.audio), size):
        yield Append(event.event_id, event.audio[start : start + size])


def _ending_of(task: asyncio.Task[Any]) -> Ending:
    try:
        ending: Ending = task.result()
    except SlowReaderError:
        return Ending(POLICY_VIOLATION, "you read too slowly")
    except (WebSocketDisconnect, OSError):
        return CLIENT_LEFT
    except Exception:
        logger.exception("a realtime session failed")
        return Ending(
            INTERNAL_ERROR, "internal error", SplitscribeError("The server had an error.")
        )
    return ending


def _left_over(ending: Ending) -> SplitscribeError:
    if ending.drains:
        return WorkerDrainingError("the session ended before this turn was transcribed")
    return ending.error or WorkerError("the session ended before this turn was transcribed")


def _expired(message: str, code: str = "session_expired") -> Ending:
    return Ending(GOING_AWAY, message, InvalidRequestError(message, code=code), drains=True)


def _time(limits: LiveSettings) -> str:
    minutes = limits.max_session_s / 60
    return f"{minutes:.0f} minutes" if minutes >= 2 else f"{limits.max_session_s:g} s"


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
