"""Times READs of KV between an exporter and an importer of this process, by the real transport."""

from __future__ import annotations

from collections.abc import Callable

from cluster.kv.exporter import KVExporter
from cluster.kv.importer import KVImporter
from cluster.planning.profile.model import LinkProfile

READ_S = 30.0
FIRST = 2  # READs that warm up
LEAST_LATENCY_S = 1e-6


def time_reads(
    exporter: KVExporter, importer: KVImporter, rounds: int, tell: Callable[[str], None]
) -> LinkProfile:
    """Latency and rate, of the line through a short window's READ and a whole one's."""
    layout = exporter.layout
    whole = layout.n_frames
    short = max(1, whole // 10) if importer.pool.packs else layout.page_frames
    times = {
        frames: min([_read_s(exporter, importer, frames) for _ in range(FIRST + rounds)][FIRST:])
        for frames in {short, whole}
    }
    n_bytes = {
        frames: layout.pages_for(frames) * importer.pool.filled_bytes(frames) for frames in times
    }
    rate = n_bytes[whole] / times[whole]
    if short != whole and times[whole] > times[short]:
        rate = (n_bytes[whole] - n_bytes[short]) / (times[whole] - times[short])
    latency_s = max(LEAST_LATENCY_S, times[whole] - n_bytes[whole] / rate)
    tell(
        f"hand-off by {importer.transport}: {n_bytes[whole] / 1e6:.1f} MB in "
        f"{1000 * times[whole]:.2f} ms"
    )
    return LinkProfile(transport=importer.transport, latency_s=latency_s, bytes_per_s=rate)


def _read_s(exporter: KVExporter, importer: KVImporter, frames: int) -> float:
    n_pages = exporter.layout.pages_for(frames)
    pages = exporter.reserve(n_pages, READ_S)
    target = importer.pool.allocate(n_pages, READ_S)
    assert pages is not None
    assert target is not None
    handle = exporter.publish(pages, request_id="profile", window=0, attempt=1, frames=frames)
    importer.accept(handle)
    stats = importer.fetch(handle, target).result(READ_S)
    importer.pool.release(target)
    return stats.seconds
