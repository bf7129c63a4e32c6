"""Which models clients may name, and how.

Knows names and languages, nothing of checkpoints.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cluster.errors import ModelNotFoundError
from router.schemas import ModelListResponse, ModelResponse

ALIAS = "whisper-1"  # the hosted service's name, which many clients cannot change
_SHOWN = 128  # characters of an unknown name that the message repeats


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind this router.

    names: what it is listed as, the first one foremost; languages: codes it knows; created:
    Unix time.
    """

    names: tuple[str, ...]
    languages: tuple[str, ...]
    created: int = field(default_factory=lambda: int(time.time()))
    owned_by: str = "splitscribe"

    def describe(self, name: str) -> ModelResponse:
        """The model under one of its names or the alias.

        Raises:
            ModelNotFoundError: it is not called that.
        """
        if name not in self.names and name != ALIAS:
            offered = ", ".join(f"'{known}'" for known in self.names)
            raise ModelNotFoundError(
                f"The model '{name[:_SHOWN]}' does not exist here; this server has: {offered}"
            )
        return ModelResponse(id=name, created=self.created, owned_by=self.owned_by)

    def listing(self) -> ModelListResponse:
        """Every name; the alias is left out, since it is the same model once more."""
        return ModelListResponse(data=[self.describe(name) for name in self.names])
