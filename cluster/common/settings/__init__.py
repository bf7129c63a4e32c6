"""Frozen settings, one model for each role, composed into `Settings`.

"auto" is resolved once, into a new object, by the role that knows its hardware. Where values come
from is in `cluster.common.settings_sources`. Import the names from here.
"""

from __future__ import annotations

from cluster.common.settings.base import (
    Attention,
    Context,
    Device,
    DType,
    EncoderDType,
    FrozenModel,
    Handoff,
    Kernels,
    KVDType,
    Labels,
    Listener,
    LivePolicy,
    LogLevel,
    Page,
    PlacementName,
    RayDashboard,
    Texts,
    Transport,
)
from cluster.common.settings.batches import BatchSettings
from cluster.common.settings.router import LiveSettings, RouterSettings
from cluster.common.settings.whole import BUNDLED_MODEL, ModelSettings, RoleSettings, Settings
from cluster.common.settings.workers import (
    DecoderSettings,
    EncoderSettings,
    PoolSettings,
    ScalingSettings,
)

__all__ = [
    "BUNDLED_MODEL",
    "Device",
    "DType",
    "EncoderDType",
    "Handoff",
    "KVDType",
    "Transport",
    "PlacementName",
    "Attention",
    "Listener",
    "Context",
    "LivePolicy",
    "Kernels",
    "RayDashboard",
    "Page",
    "LogLevel",
    "Texts",
    "Labels",
    "FrozenModel",
    "LiveSettings",
    "RouterSettings",
    "PoolSettings",
    "EncoderSettings",
    "DecoderSettings",
    "ScalingSettings",
    "BatchSettings",
    "ModelSettings",
    "Settings",
    "RoleSettings",
]
