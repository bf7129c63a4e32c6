"""The seam between a role and the way KV moves: exporter, importer, and their contract.

Each has a pool of one layout, whose payload is what it moves: cross-attention KV or encoder states.
Two transports implement it: `cluster.kv.nixl` (RDMA, NVLink, shared memory, TCP) and
`cluster.kv.memory` (same process). Both pass the tests in `tests/contract`.

All methods may be called from any thread; none blocks on a transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from cluster.kv.layout import PageLayout
from cluster.kv.pool import PagePool
from cluster.messages import CrossKVHandle

LEASE_S = 10.0  # from publication, or from its last renewal
RENEW_S = 3.0  # how often a decoder renews all its leases of a peer


@dataclass(frozen=True, slots=True)
class FetchStats:
    """What one fetch moved, and how long it took from post to verified generation."""

    n_bytes: int
    seconds: float
    transport: str


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What a reader's release tells of the link: `n_bytes` of payload were read in `read_s`.

    projection_s: how long the reader's worker takes to project one window's states; 0.0: it does
        not know, for it has not had any.
    """

    n_bytes: int
    read_s: float
    projection_s: float


class KVExporter(Protocol):
    """Encoder side: owns the export pool, publishes filled pages, frees them on release.

    Life of a page set: `reserve` -> the engine writes -> `publish` (now leased) -> freed by the
    reader's release, by lease expiry, or by `revoke`. `abandon` returns reserved pages that were
    never published.
    """

    layout: PageLayout
    pool: PagePool
    transport: str
    on_read: Callable[[ReadReport], None] | None  # called on the exporter's thread

    def reserve(self, n_pages: int, timeout_s: float = 0.0) -> tuple[int, ...] | None:
        """Take `n_pages` free pages, waiting up to `timeout_s`; None when they are not free.

        Raises:
            WorkerDrainingError: the exporter is closed.
        """

    def abandon(self, pages: Sequence[int]) -> None:
        """Give back pages that `reserve` returned and that were not published."""

    def publish(
        self, pages: Sequence[int], *, request_id: str, window: int, attempt: int, frames: int
    ) -> CrossKVHandle:
        """Lease written pages to whoever holds the returned, signed handle.

        The caller has finished (and on a GPU synchronised) its writes. The generation was bumped
        when the pages were reserved, so a reader of an older handle sees another value.
        """

    def revoke(self, lease: str) -> bool:
        """End a lease now; False when it is not (or no longer) known."""

    def active_leases(self) -> int: ...

    @property
    def n_expired(self) -> int:
        """Leases that ended because nobody renewed or released them."""

    def refused(self) -> Mapping[str, int]:
        """Notifications that were not acted on, by reason: "malformed" or "unknown_lease".

        A few of the latter are nobody's fault: a release that comes after the lease's end.
        """

    def healthy(self) -> str | None:
        """None when well, else why not."""

    def close(self) -> None:
        """Stop, deregister and free; idempotent."""


class KVImporter(Protocol):
    """Decoder side: verifies handles, keeps their leases alive, READs their pages.

    Life of a handle: `accept` (verified; renewed from now on) -> `fetch` into pages of the
    importer's own pool -> done, which releases the lease; or `drop` at any point.
    """

    layout: PageLayout
    pool: PagePool
    projection_s: float  # set by the decoder, told with each release; see `ReadReport`

    @property
    def transport(self) -> str:
        """What moves the bytes; may become more precise once a peer was read from."""

    @property
    def landing_pool(self) -> PagePool | None:
        """Where encoder states land; None where (so far) only KV comes."""

    def pool_for(self, handle: CrossKVHandle) -> PagePool:
        """The pool whose pages `fetch` takes for this handle, once it was accepted."""

    def accept(self, handle: CrossKVHandle) -> None:
        """Verify and begin to renew.

        Raises:
            HandleRefusedError: signature wrong (checked first).
            LayoutMismatchError: layout hash differs.
            PeerLostError: the handle's exporter is known to be gone, or suspect: an earlier
                READ from it is overdue.
            WorkerDrainingError: the importer is closed.
        """

    def fetch(self, handle: CrossKVHandle, pages: Sequence[int]) -> Future[FetchStats]:
        """READ an accepted handle's payload into `pages` of its pool, then check its generation.

        The future cannot be cancelled. It raises StaleGenerationError, PeerLostError,
        TransferTimeoutError, KVLostError (the handle is not held: never accepted, fetched or
        dropped before) or WorkerDrainingError (closed meanwhile). After a TransferTimeoutError
        the importer holds `pages` in quarantine and gives them back to the pool itself once
        nothing can write to them any more; after any other outcome they are the caller's again,
        and not before, also when the handle is dropped while it is fetched. Whatever the
        outcome, the handle is held no longer.

        Raises:
            ValueError: `pages` are not as many as the handle's.
            RuntimeError: they are not in use in that pool.
        """

    def drop(self, handle: CrossKVHandle) -> None:
        """Stop renewing and release the lease; harmless when already fetched or dropped."""

    def refused(self) -> Mapping[str, int]:
        """Handles that were not taken, by reason.

        "signature": forged, altered or of another cluster; "layout": of another model or setting;
        "replayed": fetched or dropped before; "stale": its pages had changed hands.
        """

    def healthy(self) -> str | None:
        """None when well, else why not (too many pages in quarantine, agent thread dead)."""

    def close(self) -> None: ...
