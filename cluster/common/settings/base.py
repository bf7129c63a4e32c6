"""What all models of settings have in common, and the values of settings of few choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

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


Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
EncoderDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "float8"]
Handoff = Literal["cross_kv", "encoder_states"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "float8"]
Transport = Literal["auto", "nixl", "memory"]
PlacementName = Literal["auto", "split", "colocated"]
Attention = Literal["auto", "flashinfer", "torch"]
Listener = Literal["auto", "router", "serve"]
Context = Literal["auto", "full", "trimmed"]
LivePolicy = Literal["auto", "attention_peak", "local_agreement"]
Kernels = Literal["wait", "background"]
RayDashboard = Literal["none", "serve", "all"]
Page = Literal["auto", "on", "off"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
