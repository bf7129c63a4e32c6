"""The command `splitscribe check`, which tells what a cluster would use on this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from cluster.common.cores import usable_cores
from cluster.common.errors import SplitscribeError
from cluster.common.extras import install_command
from cluster.common.settings import DType
from cluster.common.settings_sources import load_settings
from cluster.serve.distribution import build_id, package_root

Row = tuple[str, str, bool]  # topic, finding, whether it is well

DTYPES: tuple[DType, ...] = ("auto", "float32", "int8")  # for which kernels are compiled


def check(
    compile_kernels: Annotated[
        bool,
        typer.Option(
            "--compile", help="compile the CPU kernels now, so that no later start waits for them"
        ),
    ] = False,
) -> None:
    """Show what this machine has, and which device and transport a cluster would use here."""
    rows: list[Row] = []
    probes = [
        _system,
        _packages,
        _torch,
        _attention,
        _gpu,
        _transport,
        _placement,
        _model,
        _speakers,
        _memory,
    ]
    for probe in [*probes, _kernels] if compile_kernels else probes:
        try:
            rows.extend(probe())
        except SplitscribeError as error:
            rows.append((probe.__name__.strip("_"), error.message, False))
    table = Table(box=None, padding=(0, 2), show_header=False)
    for what, finding, well in rows:
        table.add_row("[green]ok[/]" if well else "[red]no[/]", what, finding)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    well = all(row[2] for row in rows)
    console.print(
        "A cluster can run here." if well else "A cluster cannot run here: see 'no' above."
    )
    raise typer.Exit(0 if well else 1)


def _system() -> list[Row]:
    python = platform.python_version()
    return [
        ("system", f"{platform.system()} {platform.machine()}, Python {python}", True),
        ("cores", f"{usable_cores()}", True),
    ]


def _packages() -> list[Row]:
    rows: list[Row] = [("splitscribe", f"{build_id()} in {package_root()}", True)]
    for name in ("ray", "torch", "av", "onnxruntime", "silero-vad", "tokenizers"):
        try:
            rows.append((name, version(name), True))
        except PackageNotFoundError:
            rows.append((name, f"not installed: {install_command()}", False))
    return rows


def _torch() -> list[Row]:
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return [("device", f"cuda: {names}", True)]
    features = torch.backends.cpu.get_cpu_capability()
    return [
        ("device", f"cpu ({features}, {torch.get_num_threads()} threads); no CUDA device", True)
    ]


def _attention() -> list[Row]:
    import torch

    if not torch.cuda.is_available():
        return [("attention", "compiled kernels (CPU); torch where they do not build", True)]
    from cluster.common.kernels.gpu.kernels import loads_triton

    kernels = "Triton's" if loads_triton() else "torch's: no C compiler, or no Python headers"
    rows = [("kernels", kernels, loads_triton())]
    if importlib.util.find_spec("flashinfer") is None:
        return [*rows, ("attention", f"torch; for flashinfer: {install_command('gpu')}", True)]
    return [*rows, ("attention", "flashinfer", True)]


def _gpu() -> list[Row]:
    """Start both roles on the GPU with the bundled model, and report what self-checks found."""
    import torch

    if not torch.cuda.is_available():
        return []
    from cluster.common.kernels.gpu.self_check import INSTEAD, turned_off
    from cluster.common.settings import Settings
    from cluster.serve.in_process import local_engines

    async def start() -> None:
        async with local_engines(Settings(model="demo")):
            pass

    try:
        asyncio.run(start())
    except Exception as error:  # a device may raise any error
        return [("results on the GPU", f"{type(error).__name__}: {error}", False)]
    found = [(way, f"{INSTEAD[way]} instead: {why}", False) for way, why in turned_off.items()]
    return found or [("results on the GPU", "those of float32, but for rounding", True)]


def _transport() -> list[Row]:
    from cluster.common.kv.connect import available_transport

    transport = available_transport()
    if transport == "nixl":
        return [("transport", "nixl (UCX picks shared memory, TCP or RDMA for each pair)", True)]
    note = "memory: NIXL has wheels for Linux only, so both roles are one worker here"
    return [("transport", note, platform.system() != "Linux")]


def _placement() -> list[Row]:
    from cluster.serve.placement import place, this_machine

    return [("placement", str(place(load_settings(), this_machine())), True)]


def _model() -> list[Row]:
    from cluster.common.model.checkpoint import open_checkpoint

    dims = open_checkpoint("demo").dims
    layers = f"{dims.n_audio_layer}+{dims.n_text_layer} layers, width {dims.n_audio_state}"
    return [("bundled model", layers, True)]


def _speakers() -> list[Row]:
    from router.audio.embedding import SpeakerNetwork, fingerprint

    model = load_settings().speaker_network().model
    if model is None:
        return [("speakers by voice", "no: speakers.model names no network", True)]
    SpeakerNetwork(Path(model))
    return [("speakers by voice", f"{model} (sha256 {fingerprint(Path(model))})", True)]


def _memory() -> list[Row]:
    free_gib = psutil.virtual_memory().available / 2**30
    return [("free memory", f"{free_gib:.1f} GiB (the demo takes about 3)", free_gib > 1.5)]


def _kernels() -> list[Row]:
    rows: list[Row] = []
    for name, build in _builds().items():
        began_s = time.monotonic()
        built = build() is not None
        took = f"{time.monotonic() - began_s:.1f} s" if built else "not compiled: see above"
        rows.append(("kernels", f"{name}, {took}", built))
    return rows


def _builds() -> dict[str, Callable[[], Any]]:
    import torch

    from cluster.common.model.device import resolve_dtype
    from cluster.common.model.weights import TORCH_DTYPES
    from decoder_worker.cpu.compiled import all_kinds, decoder_kernels
    from encoder_worker.cpu.team import team_kernels

    builds: dict[str, Callable[[], Any]] = {}
    for dtype in DTYPES:
        computes_in = TORCH_DTYPES[resolve_dtype(dtype, "cpu")]
        int8 = dtype == "int8"
        name = f"encoder {computes_in}{' in int8' if int8 else ''}"
        builds[name] = partial(team_kernels, computes_in, int8=int8)
        for kinds in all_kinds(bfloat16=computes_in == torch.bfloat16, int8=int8):
            builds[f"decoder {kinds}"] = partial(decoder_kernels, kinds)
    return builds
