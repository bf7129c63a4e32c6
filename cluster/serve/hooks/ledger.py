"""The work ledger and the random source of this process, which Serve's hook for routing takes.

Serve makes the hook itself from a class that is sent by value, so a ledger that was handed to that
would be a copy. What it shares with the pool's client lies in this module, which both import.
"""

from __future__ import annotations

import random

from cluster.serve.worker_choice import WorkLedger

PROCESS_LEDGER = WorkLedger()
CHANCE = random.Random()
