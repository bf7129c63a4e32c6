"""Tells clients' servers that a batch has ended, as OpenAI's webhooks do.

Signed by Standard Webhooks, so that `client.webhooks.unwrap` of OpenAI's SDK checks it. Deliveries
are rows: they survive a restart, and a host that hangs delays nothing but its own. A host that does
not take one is tried again, ever later, and then given up.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import httpx

from cluster.errors import InvalidRequestError, SplitscribeError
from cluster.metrics import Recorder
from router.batches.database import Database, DatabaseThread
from router.batches.hosts import HostRules
from router.batches.outbound import Caller

logger = logging.getLogger(__name__)

PARAM = "webhook_url"
DELAYS_S = (5, 30, 120, 600, 1800, 3600, 7200, 14400, 28800)  # between tries; then it is given up
ANSWER_S = 15.0  # longest time of a try
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event and where it goes."""

    id: str
    batch_id: str
    url: str
    type: str
    created_at: int
    attempts: int

    @property
    def body(self) -> bytes:
        event = {
            "id": self.id,
            "object": "event",
            "created_at": self.created_at,
            "type": self.type,
            "data": {"id": self.batch_id},
        }
        return json.dumps(event, separators=(",", ":")).encode()


def signature_headers(secret: str, event_id: str, unix_s: int, body: bytes) -> dict[str, str]:
    """The headers by which the receiver knows that it was us. secret: `whsec_` and base64."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{event_id}.{unix_s}.".encode() + body
    mac = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {
        "content-type": "application/json",
        "webhook-id": event_id,
        "webhook-timestamp": str(unix_s),
        "webhook-signature": f"v1,{mac}",
    }


class WebhookTable:
    """Deliveries that are left to do. Runs in the database's thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def due(self, now: int, but: frozenset[str]) -> list[Delivery]:
        """Those whose time has come, apart from those that are being made."""
        rows = self._database.all(
            "SELECT * FROM webhooks WHERE due_at <= ? ORDER BY due_at LIMIT ?",
            now,
            AT_ONCE + len(but),
        )
        return [
            Delivery(
                row["id"],
                row["batch_id"],
                row["url"],
                row["type"],
                row["created_at"],
                row["attempts"],
            )
            for row in rows
            if row["id"] not in but
        ]

    def forget(self, delivery: Delivery) -> None:
        self._database.run("DELETE FROM webhooks WHERE id = ?", delivery.id)

    def put_off(self, delivery: Delivery, due_at: int) -> None:
        self._database.run(
            "UPDATE webhooks SET attempts = attempts + 1, due_at = ? WHERE id = ?",
            due_at,
            delivery.id,
        )


class Webhooks:
    """Makes deliveries."""

    def __init__(
        self,
        table: WebhookTable,
        thread: DatabaseThread,
        rules: HostRules,
        secret: str | None,
        recorder: Recorder,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._table = table
        self._thread = thread
        self._rules = rules
        self._secret = secret
        self._recorder = recorder
        self._unix_time = unix_time
        self._caller = Caller()
        self._running: dict[str, asyncio.Task[None]] = {}

    async def check(self, url: str) -> None:
        """Raises InvalidRequestError: this server will not call `url`."""
        if self._secret is None:
            raise InvalidRequestError(
                "This server sends no webhooks; its settings batches.webhook_hosts and "
                "batches.webhook_secret turn them on.",
                param=PARAM,
                code="webhooks_not_enabled",
            )
        try:
            await self._rules.check(url, PARAM)
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                f"the host of '{PARAM}' is not known: {error}", param=PARAM
            ) from None

    async def deliver_due(self) -> None:
        """Begin the deliveries whose time has come."""
        if self._secret is None or len(self._running) >= AT_ONCE:
            return
        now = int(self._unix_time())
        due = await self._thread.call(self._table.due, now, frozenset(self._running))
        for delivery in due[: AT_ONCE - len(self._running)]:
            task = asyncio.create_task(self._deliver(delivery, self._secret))
            self._running[delivery.id] = task
            task.add_done_callback(partial(self._done, delivery.id))

    async def close(self) -> None:
        """End what is being delivered; it stays due."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._caller.close()

    def _done(self, delivery_id: str, _: asyncio.Task[None]) -> None:
        self._running.pop(delivery_id, None)

    async def _deliver(self, delivery: Delivery, secret: str) -> None:
        why = await self._try(delivery, secret)
        if not why:
            self._recorder.add("splitscribe_batch_webhooks_total", outcome="delivered")
            await self._thread.call(self._table.forget, delivery)
        elif delivery.attempts < len(DELAYS_S):
            self._recorder.add("splitscribe_batch_webhooks_total", outcome="put_off")
            due_at = int(self._unix_time()) + DELAYS_S[delivery.attempts]
            await self._thread.call(self._table.put_off, delivery, due_at)
        else:
            self._recorder.add("splitscribe_batch_webhooks_total", outcome="given_up")
            logger.warning("a webhook of %s is given up: %s", delivery.batch_id, why)
            await self._thread.call(self._table.forget, delivery)

    async def _try(self, delivery: Delivery, secret: str) -> str:
        """Why it was not taken; empty: it was."""
        now = int(self._unix_time())
        headers = signature_headers(secret, delivery.id, now, delivery.body)
        try:
            async with asyncio.timeout(ANSWER_S):
                destination = await self._rules.check(delivery.url, PARAM)
                async with self._caller.call(
                    "POST", destination, headers, delivery.body
                ) as response:
                    taken = 200 <= response.status_code < 300
                    return "" if taken else f"the host answered {response.status_code}"
        except (SplitscribeError, httpx.HTTPError, OSError) as error:  # TimeoutError is an OSError
            return str(error) or type(error).__name__
        except Exception as error:  # such as of what is no URL: it counts as a try, too
            logger.warning("a webhook of %s cannot be sent", delivery.batch_id, exc_info=True)
            return str(error) or type(error).__name__
