"""Imports Ray Serve without pandas: what every process of a started Ray does first.

Serve imports pandas where that is installed, as it is with the extra `bulk`, to answer requests
with data frames, which nothing here does. That takes 32 MB and a quarter of a second in each of
five processes. Who needs pandas imports it later, as ever.

Ray's workers import this while they wait for their first task (`RAY_preload_python_modules`).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_MODULES: dict[str, Any] = sys.modules


def import_serve() -> None:
    """As `import ray.serve`; pandas is left out where nobody has imported it yet."""
    hides = "pandas" not in _MODULES
    if hides:
        _MODULES["pandas"] = None  # an import of it fails
    try:
        importlib.import_module("ray.serve")
    finally:
        if hides:
            _MODULES.pop("pandas", None)


import_serve()
