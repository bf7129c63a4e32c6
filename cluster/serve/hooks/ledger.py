"""What Serve's hook for routing takes from this process: work ledger, random source, pool sizes.

Serve makes the hook itself from a class that is sent by value, so a ledger that was handed to that
would be a copy. What it shares with the pool's client lies in this module, which both import.
"""

from __future__ import annotations

import random

from cluster.serve.worker_choice import WorkLedger

PROCESS_LEDGER = WorkLedger()
CHANCE = random.Random()
LARGE_POOLS: dict[str, int] = {}  # workers of each pool that is asked, by its deployment's id
