"""Tells clients' servers that a batch has ended, as OpenAI's webhooks do.

Signed by Standard Webhooks, so that `client.webhooks.unwrap` of OpenAI's SDK checks it. Deliveries
survive a restart, and a host that hangs delays nothing but its own; it is tried again, ever later.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
from typing import Any

import httpx

from cluster.common.errors import InvalidRequestError, SplitscribeError
from router.batches.hosts import HostRules
from router.batches.outbound import Caller
from router.batches.owned import Owned
from router.batches.store import OpenBatch

logger = logging.getLogger(__name__)

PARAM = "webhook_url"
DELAYS_S = (5, 30, 120, 600, 1800, 3600, 7200, 14400, 28800)  # between tries; then it is given up
ANSWER_S = 15.0  # longest time of a try
AT_ONCE = 8
UNNOTED_S = 60.0  # between deliveries of one that the database does not note


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


class Webhooks(Caller):
    def __init__(self, owned: Owned, rules: HostRules) -> None:
        super().__init__()
        self._store, self._recorder = owned.store, owned.recorder
        self._call = owned.store.database.call
        self._secret = owned.settings.webhook_secret
        self._rules = rules
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
        except OSError as error:
            raise InvalidRequestError(
                f"the host of '{PARAM}' is not known: {error}", param=PARAM
            ) from None

    async def deliver_due(self) -> None:
        most = AT_ONCE - len(self._running)
        if self._secret is None or not most:
            return
        for batch in await self._call(self._store.due_webhooks, list(self._running), most):
            self._running[batch.id] = asyncio.create_task(self._deliver(batch, self._secret))

    async def close(self) -> None:
        """End what is being delivered; it stays due."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    async def _deliver(self, batch: OpenBatch, secret: str) -> None:
        try:
            why = await self._try(batch, secret)
            may_again = bool(why) and batch.webhook_tries < len(DELAYS_S)
            delay_s = DELAYS_S[batch.webhook_tries] if may_again else None
            await self._call(self._store.note_webhook, batch.id, delay_s)
            outcome = "put_off" if may_again else "given_up" if why else "delivered"
            self._recorder.add("splitscribe_batch_webhooks_total", outcome=outcome)
            if outcome == "given_up":
                logger.warning("a webhook of %s is given up: %s", batch.id, why)
        except Exception:  # of the database, such as of a full disk: it stays due
            logger.exception("a webhook of %s was made and cannot be noted", batch.id)
            await asyncio.sleep(UNNOTED_S)
        finally:
            del self._running[batch.id]

    async def _try(self, batch: OpenBatch, secret: str) -> str:
        """Why it was not taken; empty: it was."""
        event = event_of(batch)
        body = json.dumps(event, separators=(",", ":")).encode()
        headers = signature_headers(secret, event["id"], self._store.now, body)
        try:
            async with asyncio.timeout(ANSWER_S):
                destination = await self._rules.check(str(batch.webhook_url), PARAM)
                async with self.call("POST", destination, headers, body) as response:
                    taken = 200 <= response.status_code < 300
                    return "" if taken else f"the host answered {response.status_code}"
        except Exception as error:
            if not isinstance(error, SplitscribeError | httpx.HTTPError | OSError):
                # Such as of what httpx cannot send: it counts, too.
                logger.warning("a webhook of %s cannot be sent", batch.id, exc_info=True)
            return str(error) or type(error).__name__


def event_of(batch: OpenBatch) -> dict[str, Any]:
    """What tells that it has ended; the same, with its id, each time that it is sent."""
    return {
        "id": batch.id.replace("batch_", "evt_"),
        "object": "event",
        "created_at": getattr(batch, f"{batch.status}_at"),
        "type": f"batch.{batch.status}",
        "data": {"id": batch.id},
    }
