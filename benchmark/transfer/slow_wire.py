"""What hands a window of large-v3 over sooner on a slow wire: its KV, or the encoder's states.

    python -m benchmark.transfer.slow_wire [--rounds 5] [--out FILE]

Encoder and decoder are two processes of this host. Their wire is the real one, held to a rate: a
READ is done no earlier than a link of that rate would have carried its bytes, one after the other.
In each round both payloads take turns at each rate, with windows that are asked for at once. States
are handed over when the decoder has projected them into its own pages; the encoder's projection,
which KV needs, is not counted. An H200's figures are arithmetic. Prints the ceilings first, then
the tables, one JSON line last.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.flops import FRAMES, SHAPES, projection_flops
from benchmark.shared.machine import cpu_info
from benchmark.transfer.kv_transfer import CONFIG, Encoder
from cluster.common.kv.cross_kv import CrossKVProjection
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.layout import PageLayout, window_bytes
from cluster.common.kv.nixl_wire import NixlWire
from cluster.common.kv.pool import PagePool

GBIT = 1e9 / 8  # bytes
WIRES = {"25 Gbit/s": 25 * GBIT, "10 Gbit/s": 10 * GBIT, "1 Gbit/s": GBIT}
H200_WIRES = {"NVLink, 450 GB/s": 450e9, "400 Gbit/s": 400 * GBIT, "100 Gbit/s": 100 * GBIT} | WIRES
WINDOWS = 2  # asked for at once
H200_FLOPS = 0.6 * 989e12  # 0.6 of its products in bfloat16
SHAPE = SHAPES["large-v3"]
KV = PageLayout("m", SHAPE.decoder_layers, SHAPE.n_head, 64, FRAMES, FRAMES, "bfloat16")
STATES = PageLayout.of_states("m", SHAPE.d_model, FRAMES, "bfloat16")
LAYOUTS: dict[str, PageLayout] = {"KV": KV, "states": STATES}
BYTES = {of: window_bytes(layout) for of, layout in LAYOUTS.items()}


class HeldWire(NixlWire):
    """A wire that carries `bytes_per_s`: a read of pages is done when its bytes had the time."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(CONFIG)
        self._rate = bytes_per_s
        self._free_at_s = 0.0
        self._done_s: dict[object, float] = {}  # by read

    def read_pages(self, agent: str, descs: Any) -> object:
        read, moved_s = super().read_pages(agent, descs), sum(d.n_bytes for d in descs) / self._rate
        self._free_at_s = max(time.perf_counter(), self._free_at_s) + moved_s
        self._done_s[read] = self._free_at_s
        return read

    def poll(self, read: object) -> bool:
        return time.perf_counter() >= self._done_s.get(read, 0.0) and super().poll(read)


class Decoder:
    """A decoder's pool of KV and its projection, of random weights in bfloat16."""

    def __init__(self) -> None:
        dims = {"n_audio_ctx": FRAMES, "n_audio_state": SHAPE.d_model, "n_text_head": SHAPE.n_head}
        dims |= {"n_text_state": SHAPE.d_model, "n_text_layer": KV.n_layer, "text_head_dim": 64}
        checkpoint: Any = SimpleNamespace(dims=SimpleNamespace(**dims))
        with patch("cluster.common.kv.cross_kv.load_tensors", _random_weights):
            self._projection = CrossKVProjection(checkpoint, torch.bfloat16)
        self._pool = PagePool(KV, WINDOWS)
        self._pool.tensor.zero_()
        self.projection_ms: list[float] = []

    def take_ms(self, encoder: Encoder, layout: PageLayout, bytes_per_s: float) -> float:
        """Until the KV of all windows lies in the pages; they are asked for at once."""
        importer = KVImporter(layout, WINDOWS, CONFIG, HeldWire(bytes_per_s))
        try:
            importer.pool.tensor.zero_()
            handles = [encoder.call("publish") for _ in range(WINDOWS)]
            pages = [importer.pool.allocate(1) or () for _ in handles]
            for handle in handles:
                importer.accept(handle)
            time.sleep(0.2)  # it is connected
            began = time.perf_counter()
            for window, fetch in enumerate(map(importer.fetch, handles, pages)):
                fetch.result()
                if layout is STATES:
                    self._project(importer.pool.tensor[pages[window][0]], window)
            return 1e3 * (time.perf_counter() - began)
        finally:
            importer.close()

    @torch.inference_mode()
    def _project(self, states: torch.Tensor, window: int) -> None:
        began = time.perf_counter()
        self._projection.write(states[None], self._pool.tensor, [[window]])
        self.projection_ms.append(1e3 * (time.perf_counter() - began))


def _random_weights(_: Any, shapes: dict[str, Any], *__: Any) -> dict[str, torch.Tensor]:
    return {name: torch.randn(size).mul(0.02).bfloat16() for name, size in shapes.items()}


def h200_ms() -> dict[str, dict[str, float]]:
    """Milliseconds from the request to a window's KV, by wire and payload."""
    projection_s = projection_flops(SHAPE) / H200_FLOPS
    then_s = {"KV": 0.0, "states": projection_s}
    return {
        wire: {of: round(1e3 * (BYTES[of] / per_s + then_s[of]), 2) for of in BYTES}
        for wire, per_s in H200_WIRES.items()
    }


def by_wire(figures: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    return [{"wire": wire, **row} for wire, row in figures.items()]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    args = parser.parse_args()
    ceilings = {
        wire: {of: round(per_s / n_bytes, 1) for of, n_bytes in BYTES.items()}
        for wire, per_s in WIRES.items()
    }
    print_table(by_wire(ceilings), "ceilings: windows a second that the wire carries")
    encoder, decoder = Encoder(), Decoder()
    times: dict[str, dict[str, list[float]]] = {wire: {"KV": [], "states": []} for wire in WIRES}
    for _ in range(args.rounds):
        for of, layout in LAYOUTS.items():
            encoder.call("open", layout, WINDOWS)
            for wire, per_s in WIRES.items():
                times[wire][of].append(decoder.take_ms(encoder, layout, per_s))
    encoder.close()
    taken_ms = {
        wire: {of: round(statistics.median(rounds), 1) for of, rounds in by_payload.items()}
        for wire, by_payload in times.items()
    }
    projection_ms = round(statistics.median(decoder.projection_ms), 1)
    print_table(by_wire(taken_ms), f"ms for {WINDOWS} windows, {projection_ms:g} to project one")
    print_table(by_wire(h200_ms()), "an H200, by arithmetic: ms for a window")
    asked = {**cpu_info(), "windows": WINDOWS, "rounds": args.rounds, "ceilings_per_s": ceilings}
    taken = {"projection_ms": projection_ms, "taken_ms": taken_ms, "h200_ms": h200_ms()}
    print_result("slow_wire", asked | taken, args.out)


if __name__ == "__main__":
    main()
