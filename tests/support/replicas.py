"""A worker of both roles that no Serve runs."""

from __future__ import annotations

from cluster.serve.colocated import ColocatedWorker


class Worker(ColocatedWorker):
    def __del__(self) -> None:  # type: ignore[override]
        """Serve's hook, which Serve alone calls."""
