"""The former name of `cluster.serve.from_file`: `import_path: cluster.serve_app:build` still works.

Serve configurations that people have written name it. It goes with the next version.
"""

from __future__ import annotations

import warnings

from cluster.serve.from_file import build

__all__ = ["build"]

warnings.warn(
    "import_path cluster.serve_app:build is now cluster.serve.from_file:build; "
    "the old name goes with the next version",
    FutureWarning,
    stacklevel=2,
)
