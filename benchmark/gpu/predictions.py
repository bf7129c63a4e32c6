"""The tables of `benchmark.gpu.roofline`: floor, torch's layers and ours, counted and predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmark.gpu import roofline
from benchmark.gpu.launches import Work, count
from benchmark.gpu.meta_models import decode_step, encode
from benchmark.gpu.roofline import Gpu
from benchmark.shared.command import print_result
from benchmark.shared.flops import encoder_flops
from benchmark.shared.shapes import SHAPES

MODELS = ("large-v3", "large-v3-turbo")
ROWS = (1, 8, 32, 64)
CONTEXTS = (1500, 350)
WINDOWS = 8  # of a batch
LIVE_POSITIONS = (1500, 512, 320)  # padded; 8 s and 5 s of audio, trimmed with a slack of 64
ENCODERS = {"torch": "torch's layers", "fused": "ours", "float8": "ours, 8 bits"}
SELF_CONTEXT = 64  # positions of self-attention: the middle of a text of 120 tokens


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds that no program is faster than; and of what is launched, kernels and seconds."""

    floor_s: float
    before: Work
    before_s: float
    after: Work
    after_s: float

    def as_json(self) -> dict[str, Any]:
        return {
            "floor_ms": round(1e3 * self.floor_s, 3),
            "torch_kernels": self.before.n_kernels,
            "torch_ms": round(1e3 * self.before_s, 3),
            "ours_kernels": self.after.n_kernels,
            "ours_ms": round(1e3 * self.after_s, 3),
        }


def predict_step(model: str, n_rows: int, context: int, gpu: Gpu, launch_s: float) -> Predicted:
    """One decode step of `n_rows` windows of which each has `context` encoder positions."""
    shape = SHAPES[model]
    kv = roofline.kv_bytes(shape, context + SELF_CONTEXT)
    floor_s = (roofline.weight_bytes(shape) + n_rows * kv) / gpu.bytes_per_s
    works = [
        count(decode_step(model, n_rows, fused=fused), context=context, self_context=SELF_CONTEXT)
        for fused in (False, True)
    ]
    before_s, after_s = (roofline.predicted_s(w.launches, gpu, launch_s) for w in works)
    return Predicted(floor_s, works[0], before_s, works[1], after_s)


def predict_encoders(model: str, gpu: Gpu, launch_s: float) -> dict[str, dict[str, float]]:
    """By layers: kernels of a batch of WINDOWS, and milliseconds of one of its windows."""
    flops = encoder_flops(SHAPES[model])
    found = {"floor": {"ms": round(1e3 * flops / gpu.flops, 3)}}
    for layers in ENCODERS:
        work = count(encode(model, WINDOWS, layers))
        seconds = roofline.predicted_s(work.launches, gpu, launch_s) / WINDOWS
        n_gb = work.n_bytes / WINDOWS / 1e9
        found[layers] = {
            "kernels": work.n_kernels,
            "gb": round(n_gb, 3),
            "ms": round(1e3 * seconds, 3),
        }
    return found


def predict_live(model: str, positions: int, gpu: Gpu, launch_s: float) -> dict[str, float]:
    """Live sessions of one GPU that are updated once a second, with windows of so many positions.

    By turns: encoder and decoder wait for each other; overlapped: they do not.
    """
    live, shape = roofline.Live(), SHAPES[model]
    found: dict[str, float] = {}
    for layers, name in (("fused", ""), ("float8", "float8_")):
        work = count(encode(model, WINDOWS, layers, positions))
        encoder_s = roofline.predicted_s(work.launches, gpu, launch_s) / WINDOWS
        step_s = predict_step(model, live.rows, positions, gpu, launch_s).after_s
        update = roofline.live_update_s(shape, gpu, encoder_s, step_s, positions, live)
        found[f"{name}encoder_ms"], found[f"{name}decoder_ms"] = (1e3 * part for part in update)
        found[f"{name}by_turns"] = 1 / sum(update)
        found[f"{name}overlapped"] = 1 / max(update)
    return found


def print_predictions(gpu: Gpu, launch_s: float) -> None:
    steps = {
        (model, n_rows, context): predict_step(model, n_rows, context, gpu, launch_s)
        for model in MODELS
        for context in CONTEXTS
        for n_rows in ROWS
    }
    assumed = f"predicted with {1e6 * launch_s:g} us a kernel; none of it measured on a GPU"
    columns = ("model", "context", "rows", "floor, ms", "torch's layers", "ms", "ours", "ms")
    table = Table(
        *columns, title=f"One decode step, sampling included: kernels and time, {assumed}"
    )
    for (model, n_rows, context), found in steps.items():
        table.add_row(model, str(context), str(n_rows), *_cells(found))
    Console(width=120).print(table)
    encoders = {model: predict_encoders(model, gpu, launch_s) for model in MODELS[:1]}
    _print_encoders(encoders)
    figures: dict[str, Any] = {"launch_us": 1e6 * launch_s, "encoders": encoders}
    figures["live"] = _print_live(launch_s)
    figures["steps"] = {
        f"{model}, {n_rows} rows, {context} positions": found.as_json()
        for (model, n_rows, context), found in steps.items()
    }
    print_result("gpu.roofline", figures)


def _print_live(launch_s: float) -> dict[str, dict[str, float]]:
    title = "Live sessions of large-v3, each updated once a second (predicted)"
    columns = ("GPU", "positions", "encoder, ms", "decoder, ms", "by turns", "overlapped", "8 bits")
    table, rows = Table(*columns, title=title), {}
    for name, gpu in (("H100", roofline.H100), ("H200", roofline.H200)):
        for positions in LIVE_POSITIONS:
            row = predict_live("large-v3", positions, gpu, launch_s)
            rows[f"{name}, {positions} positions"] = row
            table.add_row(
                name,
                str(positions),
                f"{row['encoder_ms']:.2f}",
                f"{row['decoder_ms']:.2f}",
                f"{row['by_turns']:.0f}",
                f"{row['overlapped']:.0f}",
                f"{row['float8_by_turns']:.0f} and {row['float8_overlapped']:.0f}",
            )
    Console(width=120).print(table)
    return rows


def _print_encoders(encoders: dict[str, dict[str, dict[str, float]]]) -> None:
    title = f"One of {WINDOWS} windows encoded together, from features to states (predicted)"
    table = Table("model", "layers", "kernels of the batch", "GB", "ms", title=title)
    for model, rows in encoders.items():
        table.add_row(model, "floor, bf16", "", "", f"{rows['floor']['ms']:.2f}")
        for layers, name in ENCODERS.items():
            row = rows[layers]
            cells = (f"{row['kernels']:.0f}", f"{row['gb']:.2f}", f"{row['ms']:.2f}")
            table.add_row(model, name, *cells)
    Console(width=120).print(table)


def _cells(found: Predicted) -> tuple[str, ...]:
    row = found.as_json()
    return (
        f"{row['floor_ms']:.2f}",
        *(str(row["torch_kernels"]), f"{row['torch_ms']:.2f}"),
        *(str(row["ours_kernels"]), f"{row['ours_ms']:.2f}"),
    )
