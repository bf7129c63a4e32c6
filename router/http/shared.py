"""Objects that all parts of a router's HTTP application share."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.common.clock import Clock
from cluster.common.metrics import Recorder
from cluster.common.settings import RouterSettings
from router.http.keys import KeyRing
from router.http.models import ModelRegistry
from router.http.usage import UsageAccount


@dataclass(frozen=True, slots=True)
class Shared:
    registry: ModelRegistry
    settings: RouterSettings
    keys: KeyRing
    usage: UsageAccount
    recorder: Recorder
    clock: Clock
