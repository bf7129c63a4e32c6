"""The routing ledger and the random source of this process, where Serve's hook finds them.

Serve makes the hook itself from a class sent by value, so nothing can be handed to it: what it
shares with the pool's client lies in this module, which both import. Everything else is handed a
ledger.
"""

from __future__ import annotations

import random

from cluster.serve.routing import Ledger

PROCESS_LEDGER = Ledger()
CHANCE = random.Random()
