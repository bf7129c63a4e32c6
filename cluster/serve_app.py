"""The former name of `cluster.serve.from_file`, for Serve configurations that people have written.

Their `import_path: cluster.serve_app:build` still works, and warns. It goes with the next version.
"""

from __future__ import annotations

from cluster.serve.from_file import build, warn_of_former_path

__all__ = ["build"]

warn_of_former_path()
