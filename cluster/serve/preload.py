"""Imports Ray Serve without pandas, for one machine: what every process of its Ray does first.

Serve imports pandas, where the extra `bulk` installed it, for requests with data frames, which
nothing here sends: 32 MB and a quarter of a second in each of five processes. Ray's workers import
this while they wait for their first task (`RAY_preload_python_modules`).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from cluster.serve.ray_internals import look_for_nodes_each

NODES_PERIOD_S = 2.0  # where there is one, which ends with the server

_MODULES: dict[str, Any] = sys.modules


def import_serve() -> None:
    hides = "pandas" not in _MODULES
    if hides:
        _MODULES["pandas"] = None  # an import of it fails
    try:
        importlib.import_module("ray.serve")
    finally:
        if hides:
            _MODULES.pop("pandas", None)


import_serve()
look_for_nodes_each(NODES_PERIOD_S)
