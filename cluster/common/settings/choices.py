"""The values that a setting of few choices may have."""

from __future__ import annotations

from typing import Literal

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
