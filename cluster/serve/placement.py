"""Decide whether the roles run in workers of their own, or both in one process on one GPU.

Two processes on one GPU would take turns and copy KV between them, so `auto` puts both roles into
one worker if there is exactly one GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

from cluster.common.errors import ConfigurationError
from cluster.common.settings import DecoderSettings, EncoderSettings, Settings

CUDA_DRIVER = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class Machine:
    n_gpus: int
    has_nixl: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """gpus: a share of one, of each worker that runs on a GPU."""

    kind: Literal["split", "colocated"]
    reason: str
    gpus: float = 0.0

    def __str__(self) -> str:
        share = f", {self.gpus:g} GPU for each worker" if self.gpus else ""
        return f"{self.kind} ({self.reason}{share})"

    def gpus_of(self, role: EncoderSettings | DecoderSettings) -> float:
        if role.gpus is not None:
            return role.gpus
        return 0.0 if role.device == "cpu" else self.gpus


def this_machine() -> Machine:
    return joined_machine(_count_gpus())


def _count_gpus() -> int:
    try:
        ctypes.CDLL(CUDA_DRIVER)  # without the driver, skip the slow import of torch
    except OSError:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def joined_machine(n_gpus: float) -> Machine:
    """Describe a Ray cluster with `n_gpus`. NIXL is assumed on all hosts if it loads here."""
    from cluster.common.kv.connect import available_transport

    return Machine(int(n_gpus), available_transport() == "nixl")


def place(settings: Settings, machine: Machine) -> Placement:
    """Raises ConfigurationError: the settings contradict each other or cannot run there."""
    models = list(settings.by_model().values())
    devices = [one.encoder.device for one in models] + [one.decoder.device for one in models]
    n_gpus = machine.n_gpus if "cuda" in devices or "auto" in devices else 0
    several = any(  # more than one worker of a role, or sometimes none
        (role.fewest, role.most) != (1, 1) for one in models for role in (one.encoder, one.decoder)
    )
    # If "nixl" is set and does not load, the worker raises the error with the remedy.
    in_memory = settings.transport == "memory" or (
        settings.transport == "auto" and not machine.has_nixl
    )
    kind, reason = _kind(settings, machine, n_gpus, several)
    if in_memory and kind == "split":
        if settings.placement == "split" or several:
            raise ConfigurationError(
                "the 'memory' transport keeps encoder and decoder in one process, so there can be "
                "one of each at all times, colocated; other numbers, or split ones, need NIXL, "
                "which has wheels for Linux"
            )
        kind, reason = "colocated", "KV moves in memory"
    if kind == "colocated":
        _check_colocated(settings, several)
    if "cuda" in devices:
        n_gpus = max(1, n_gpus)  # Ray or the worker reports a missing GPU
    return Placement(kind, reason, _gpus_each(models, kind, n_gpus))


def _kind(
    settings: Settings, machine: Machine, n_gpus: int, several: bool
) -> tuple[Literal["split", "colocated"], str]:
    if settings.placement != "auto":
        return settings.placement, "as set"
    if n_gpus == 0:
        return "split", "no GPU"
    if n_gpus > 1:
        return "split", f"{n_gpus} GPUs"
    if several or settings.transport == "nixl":
        return "split", "one GPU: workers take turns, but they were asked for"
    return "colocated", "one GPU: processes would take turns"


def _check_colocated(settings: Settings, several: bool) -> None:
    if several:
        raise ConfigurationError(
            "placement 'colocated' has one worker for each model, which is encoder and decoder, at "
            "all times: set replicas, min_replicas and max_replicas of both to 1, or placement to "
            "'split'"
        )
    if settings.transport == "nixl":
        raise ConfigurationError(
            "placement 'colocated' moves KV in memory: leave transport at 'auto', or set "
            "placement to 'split'"
        )
    for one in settings.by_model().values():
        if one.encoder.device != one.decoder.device:
            raise ConfigurationError(
                f"placement 'colocated' has one device: encoder.device is "
                f"{one.encoder.device!r}, decoder.device {one.decoder.device!r}"
            )


def _gpus_each(models: list[Settings], kind: str, n_gpus: int) -> float:
    """Return the share of a GPU with which all workers run at once, at most 1."""
    if n_gpus == 0:
        return 0.0
    n_workers = 0
    for one in models:
        roles = (one.encoder,) if kind == "colocated" else (one.encoder, one.decoder)
        n_workers += sum(role.replicas for role in roles if role.device != "cpu")
    per_gpu = -(-n_workers // n_gpus)
    return 1.0 if per_gpu <= 1 else int(1e4 / per_gpu) / 1e4  # rounded down: the sum must fit
