"""For the whole suite: OpenMP threads that wait must sleep, or tests on a busy machine crawl."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
