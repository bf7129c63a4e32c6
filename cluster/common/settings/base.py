"""What all models of settings have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _as_tuple(value: Any) -> Any:
    """Let one text stand for a list of one, and an empty one for none."""
    if value is None or value == "":
        return ()
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Labels = Mapping[str, str]


class FrozenModel(BaseModel):
    """A model whose values never change, and which refuses names that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
