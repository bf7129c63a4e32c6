"""Write `configs/settings.yaml` from the descriptions and defaults of the settings.

python -m cluster.cli.reference_config > configs/settings.yaml
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml
from pydantic import BaseModel

from cluster.common.settings import Settings

HEADER = """\
# Every setting with its default. Copy what you change into a file of your own:
#   splitscribe serve --config FILE
# A variable overrides it (SPLITSCRIBE_ROUTER__PORT=9000; lists have commas), a flag overrides both.
"""


def reference_config() -> str:
    return HEADER + "\n".join(_lines(Settings(), "")) + "\n"


def _lines(model: BaseModel, indent: str) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield ""
            yield f"{indent}{name}:  # {(type(value).__doc__ or '').splitlines()[0]}"
            yield from _lines(value, indent + "  ")
            continue
        written = yaml.safe_dump(list(value) if isinstance(value, tuple) else value)
        written = written.removesuffix("\n").removesuffix("\n...")
        comment = f"  # {field.description}" if field.description else ""
        yield f"{indent}{name}: {written}{comment}"


if __name__ == "__main__":
    print(reference_config(), end="")
