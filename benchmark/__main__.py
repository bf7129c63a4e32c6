"""What can be measured, by the command that measures it.

python -m benchmark
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent


def commands() -> dict[str, str]:
    """Module to what it measures: the first sentence of its docstring. Imports none of them."""
    found = {}
    for file in sorted([*ROOT.glob("*/*.py"), *ROOT.glob("*/*/__main__.py")]):
        source = file.read_text()
        if 'if __name__ == "__main__":' in source:
            parts = file.relative_to(ROOT.parent).with_suffix("").parts
            doc = ast.get_docstring(ast.parse(source)) or ""
            found[".".join(parts).removesuffix(".__main__")] = doc.partition("\n")[0]
    return found


def main() -> None:
    listed = commands()
    width = max(map(len, listed))
    for module, measures in listed.items():
        print(f"python -m {module:<{width}}  {measures}")


if __name__ == "__main__":
    main()
