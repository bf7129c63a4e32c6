"""The page's modules in Node, with a document that is as little as they need (`document.js`)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from router.http.page import FOLDER


def told_by_node(folder: Path, script: str, asked: Any = None) -> Any:
    """Return what `script` prints as JSON; it is a module beside the page's and finds `asked`.

    folder: an empty one, for copies of the modules.
    """
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    shutil.copy(Path(__file__).with_name("document.js"), folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "asked.js").write_text(f"const asked = {json.dumps(asked)};\n{script}")
    run = subprocess.run(
        ["node", "asked.js"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
