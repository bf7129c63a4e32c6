"""Count what each API key uses, and limit its requests a minute and hours of audio a day.

Audio counts when its transcript is complete, live audio when its session ends. Each router counts
its own requests from its start on. Limits do not end a batch that was accepted.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from cluster.common.errors import QuotaExceededError, RateLimitError
from cluster.common.metrics import Recorder
from cluster.common.settings import RouterSettings
from router.batches.service import BatchService
from router.batches.work_queue import DAY_S, USAGE_DAYS, Usage
from router.http.envelope import notes_of
from router.http.keys import KeyRing
from router.http.listener import Budget

PATH = "/organization/usage/audio_transcriptions"


@dataclass(slots=True)
class _Used:
    requests: int = 0
    audio_s: float = 0.0


class UsageAccount:
    """The usage of all keys of one router. Without keys, nothing is counted."""

    def __init__(
        self,
        keys: KeyRing,
        settings: RouterSettings,
        recorder: Recorder,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._a_minute = settings.max_requests_per_minute
        self._audio_s_a_day = 3600.0 * settings.max_audio_hours_per_day
        self._recorder = recorder
        self._unix_time = unix_time
        self._days: dict[int, dict[int, _Used]] = {}  # by the day's number, then by key
        self._in_batches: dict[int, dict[int, _Used]] = {}  # by key, then by day; last known state
        self._budgets: dict[int, Budget] = defaultdict(
            lambda: Budget(self._a_minute / 60.0, self._a_minute)
        )

    def begin(self, owner: int | None) -> None:
        """Count a request. Raises RateLimitError or QuotaExceededError."""
        if owner is None:
            return
        now_s, used = self._unix_time(), self._today(owner)
        in_batches = self._in_batches.get(owner, {}).get(int(now_s // DAY_S), _Used())
        if 0.0 < self._audio_s_a_day <= used.audio_s + in_batches.audio_s:
            raise QuotaExceededError(
                f"This API key has used its {self._audio_s_a_day / 3600.0:g} hours of audio of "
                "today; the next day begins at 00:00 UTC.",
                retry_after_s=DAY_S - now_s % DAY_S,
            )
        if self._a_minute and (wait_s := self._budgets[owner].spend(1, now_s)):
            self._budgets[owner].spend(-1, now_s)
            raise RateLimitError(
                f"This API key may send {self._a_minute} requests a minute. Please try again in "
                f"{math.ceil(wait_s)} s.",
                retry_after_s=wait_s,
            )
        used.requests += 1
        self._recorder.add("splitscribe_key_requests_total", key=self._keys.name(owner))

    def add_audio(self, owner: int | None, audio_s: float) -> None:
        if owner is not None:
            self._today(owner).audio_s += audio_s
            name = self._keys.name(owner)
            self._recorder.add("splitscribe_key_audio_seconds_total", audio_s, key=name)

    def note_batches(self, owner: int, days: Sequence[Usage]) -> None:
        """Replace what is known of the usage by this key's batches."""
        self._in_batches[owner] = {day: _Used(lines, audio_s) for day, lines, audio_s in days}

    def buckets(self, owner: int, start: int, end: float) -> list[dict[str, Any]]:
        """One bucket for each day with usage from `start` to before `end`, both in Unix seconds."""
        found = []
        in_batches = self._in_batches.get(owner, {})
        own = {day: used[owner] for day, used in self._days.items() if owner in used}
        for day in sorted(own.keys() | in_batches.keys()):
            begins, ends = day * DAY_S, (day + 1) * DAY_S
            if ends > start and begins < end:
                used = [account[day] for account in (own, in_batches) if day in account]
                result = {
                    "object": "organization.usage.audio_transcriptions.result",
                    "seconds": math.ceil(sum(one.audio_s for one in used)),
                    "num_model_requests": sum(one.requests for one in used),
                    "api_key_id": self._keys.name(owner),
                }
                bucket = {"object": "bucket", "start_time": begins, "end_time": ends}
                found.append({**bucket, "results": [result]})
        return found

    def _today(self, owner: int) -> _Used:
        today = int(self._unix_time() // DAY_S)
        of_keys = self._days.setdefault(today, {})
        if len(self._days) > USAGE_DAYS:
            del self._days[min(self._days)]
        return of_keys.setdefault(owner, _Used())


def add_usage(
    api: APIRouter, usage: UsageAccount, keys: KeyRing, batches: BatchService | None
) -> None:
    """Requests of `api` must have been checked for a key."""

    @api.get(PATH, tags=["operations"], summary="What the key that asks has used")
    async def tell_usage(
        request: Request,
        start_time: Annotated[int, Query(ge=0, description="Unix time")] = 0,
        end_time: Annotated[int | None, Query(ge=0, description="Unix time")] = None,
        bucket_width: Literal["1d"] = "1d",
    ) -> dict[str, Any]:
        """Days (UTC) since this router started, of the last 31; a day without use is left out."""
        owner = notes_of(request.scope).owner
        assert owner is not None
        if batches is not None:
            usage.note_batches(owner, await batches.usage(keys.owner_digest(owner).hex()))
        days = usage.buckets(owner, start_time, end_time or math.inf)
        return {"object": "page", "data": days, "has_more": False, "next_page": None}
