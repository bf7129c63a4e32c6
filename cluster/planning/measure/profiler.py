"""Makes a profile: times both workers' parts in this process, and a server where one is given.

The parts are those of a served worker, with the kernels that this machine compiles. They are timed
one after another, and the fastest of some rounds counts: a profile is of a worker that has its
device to itself.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from cluster.jit.background import longest_wait_s
from cluster.kv.connect import make_exporter, make_importer
from cluster.model.checkpoint import Checkpoint, open_checkpoint
from cluster.model.device import usable_cores
from cluster.planning.measure.engines import StepTimer, time_batches, time_reads
from cluster.planning.measure.server import time_server
from cluster.planning.profile import (
    AudioProfile,
    DecoderProfile,
    EncoderProfile,
    LinkProfile,
    Profile,
    RouterProfile,
    Shape,
    StartProfile,
)
from cluster.serve.distribution import build_id
from cluster.serve.in_process import on_one_device, sized_together
from cluster.settings import Settings
from encoder_worker.engine import auto_batch

# Assumed where no server is given to measure: a router's processor time is what router and proxy
# took on two cores of an EPYC (`benchmark.serving.scaling`); the others nobody has measured.
USUAL_ROUTER = RouterProfile(request_s=0.0048, window_s=0.0, hop_s=0.002)
USUAL_AUDIO = AudioProfile(request_s=0.004, audio_second_s=0.002)
PROCESS_S = 3.0  # until Ray has a process for a replica, and it has imported what it needs
PACKAGES = ("splitscribe", "torch", "ray", "nixl-cu13", "numba")
CONTEXTS = (320, 768)  # beside the whole window's
ROWS = (1, 2, 4, 8, 16, 32, 64)

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """name: of the profile. url: of a server, for its router. rounds: the fastest counts."""

    name: str
    settings: Settings
    url: str | None = None
    api_key: str | None = None
    rounds: int = 9


def measure(asked: Asked, tell: Tell) -> Profile:
    """Measure all of it; takes a minute or so on two cores.

    Raises:
        ConfigurationError: settings and checkpoint do not fit this machine, or there is no server.
    """
    router, audio = USUAL_ROUTER, USUAL_AUDIO
    if asked.url is not None:  # first: a wrong address is told at once
        router, audio = time_server(asked.url, asked.rounds, asked.api_key, tell)
    checkpoint = open_checkpoint(asked.settings.model)
    settings = on_one_device(asked.settings)
    device = settings.encoder.device
    settings = sized_together(settings, checkpoint, device)
    own = settings.model_copy(update={"cluster_key": os.urandom(32).hex()})
    n_audio_ctx = checkpoint.dims.n_audio_ctx
    contexts = [*(context for context in CONTEXTS if context < n_audio_ctx), n_audio_ctx]
    with ExitStack() as stack:
        began = time.monotonic()
        exporter = make_exporter(checkpoint, own, device, "encoder")
        stack.callback(exporter.close)
        importer = make_importer(checkpoint, own, device, "decoder")
        stack.callback(importer.close)
        kernels_s = longest_wait_s(own.kernels)
        timer = StepTimer(checkpoint, importer, own.decoder, kernels_s)
        start_s = PROCESS_S + time.monotonic() - began
        most = own.decoder.max_batch
        rows = sorted({n for n in ROWS if n < most} | {most})
        steps, prefills = timer.time(rows, contexts, asked.rounds, tell)
        handoff = time_reads(exporter, importer, asked.rounds, tell)
        max_batch = own.encoder.max_batch or auto_batch(device)
        batches = sorted({1, 2, max_batch} if max_batch > 1 else {1})
        points = time_batches(
            checkpoint, exporter, own.encoder, batches, contexts, asked.rounds, kernels_s, tell
        )
    encoder = EncoderProfile(
        points=tuple(points),
        max_batch=max_batch,
        export_windows=own.encoder.export_windows,
        overlaps=True,
    )
    decoder = DecoderProfile(
        steps=tuple(steps),
        prefills=tuple(prefills),
        max_batch=most,
        kv_windows=own.decoder.kv_windows,
        steps_ahead=timer.parts.steps_ahead,
    )
    return _profile(asked, checkpoint, own, encoder, decoder, handoff, router, audio, start_s)


def _profile(
    asked: Asked,
    checkpoint: Checkpoint,
    settings: Settings,
    encoder: EncoderProfile,
    decoder: DecoderProfile,
    handoff: LinkProfile,
    router: RouterProfile,
    audio: AudioProfile,
    start_s: float,
) -> Profile:
    from cluster.kv.connect import served_kv_layout

    layout = served_kv_layout(checkpoint, settings, settings.encoder.device)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    of_router = f"measured at {asked.url}" if asked.url else "assumed"
    return Profile(
        name=asked.name,
        predicted=False,
        source=f"splitscribe profile, the fastest of {asked.rounds}, one worker alone; router "
        f"and audio {of_router}; load of the machine {load:.1f}",
        machine={
            "cpu": _cpu_name(),
            "cores": usable_cores(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "device": settings.encoder.device,
        },
        versions=_versions(),
        commit=build_id(),
        model=checkpoint.name,
        shape=Shape.of(checkpoint.dims),
        kv_dtype=layout.dtype,
        page_frames=layout.page_frames,
        encoder=encoder,
        decoder=decoder,
        handoff=handoff,
        router=router,
        audio=audio,
        start_s=StartProfile(encoder=start_s, decoder=start_s, router=start_s),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
