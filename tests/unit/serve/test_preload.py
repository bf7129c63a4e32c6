"""Serve is imported without pandas, which stays there for whoever wants it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cluster.serve.ray_environment import ONE_MACHINE_ENVIRONMENT

pytest.importorskip("pandas")


@pytest.mark.parametrize("before", ["", "import pandas"])
def test_serve_comes_without_pandas_unless_somebody_had_it(before: str) -> None:
    module = ONE_MACHINE_ENVIRONMENT["RAY_preload_python_modules"]
    program = f"""
{before}
import json, sys
import {module}
after = "pandas" in sys.modules
import pandas
print(json.dumps({{
    "serve": "ray.serve" in sys.modules, "pandas": after, "frame": len(pandas.DataFrame([1])) == 1,
}}))
"""
    out = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=100)
    assert json.loads(out.splitlines()[-1]) == {
        "serve": True,
        "pandas": bool(before),
        "frame": True,
    }
