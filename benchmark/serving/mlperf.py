"""MLPerf's Whisper load, given by its own LoadGen to a server over HTTP. Not an MLPerf result.

    python -m benchmark.serving.mlperf                    # large-v3's shape: about 10 minutes
    python -m benchmark.serving.mlperf --shape base --dtype int8 --seconds 60
    python -m benchmark.serving.mlperf --device cuda --dtype bfloat16 --placement colocated

The load is that of MLPerf Inference since v5.1: windows of 24 s with 64 tokens each, Offline (all
at once) and Server (Poisson arrivals at a share of the offline rate). The weights are random and
force the number of tokens, so no word error rate is checked, which MLPerf demands. Beside the rate
stands that of Intel's submission to v6.0 (29.0 windows/s on 256 cores with AMX, large-v3 in 8 bits
by vLLM), on a GPU those of two engines on an H200. The ceiling is the rate of the models' products
alone, on a GPU what `benchmark.gpu` predicts. Needs `mlcommons-loadgen` (in the `bench` extra).
Prints a table, and one line of JSON last.
"""

from __future__ import annotations

import torch

from benchmark.cpu.systems import FIELDS, UNDOUBTED, by_dtype, our_server
from benchmark.gpu.rig import FULL, Rig
from benchmark.gpu.serving import OTHERS
from benchmark.serving.mixed import Speech
from benchmark.shared.clips import CACHE
from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.flops import SHAPES, window_flops
from benchmark.shared.forced_length import forced_checkpoint
from benchmark.shared.loadgen import TOKENS, WINDOW_S, SystemUnderTest, figures
from benchmark.shared.machine import cpu_info, product_flops, versions
from benchmark.shared.openai_client import Client, Upload
from benchmark.shared.speech.wav import wav_bytes
from cluster.common.cores import usable_cores
from tests.support.checkpoints import ModelShape

INTEL_PER_CORE = 29.0 / 256  # windows/s: 2 x Xeon 6980P, MLPerf Inference v6.0, Offline
IN_FLIGHT = 64  # of the windows that Offline gives at once


class Server:
    """Sends new audio each time, so that no answer comes from a cache."""

    def __init__(self, url: str, model: str) -> None:
        self._speech, self._fields = Speech(), {"model": model, **FIELDS, **UNDOUBTED}
        self.client = Client(url, timeout_s=3600.0)
        self.failures: list[str] = []

    async def __call__(self) -> str:
        body = wav_bytes(self._speech.take(WINDOW_S))
        outcome = await self.client.send(Upload.of(body, "window.wav", self._fields))
        if outcome.failure:
            self.failures.append(f"{outcome.failure}: {outcome.error}")
        return outcome.text


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="large-v3")
    add("--dtype", default="int8", help="float32, bfloat16 or int8")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--placement", default="auto", help="of both roles: auto, split or colocated")
    add("--seconds", type=float, default=60.0, help="of each scenario, at least")
    args = parser.parse_args()
    try:
        import mlperf_loadgen as loadgen
    except ImportError:
        raise SystemExit("pip install mlcommons-loadgen: the load is LoadGen's own") from None

    shape, cores = SHAPES[args.shape], usable_cores()
    folder = forced_checkpoint(CACHE / f"mlperf-{args.shape}", shape, TOKENS)
    ceiling, of = _ceiling(shape, args.device)
    print(f"ceiling of {of}: {ceiling:.3f} windows/s")
    models = by_dtype(args.shape, folder, [args.dtype], args.device)
    with our_server(models, placement=args.placement) as (system,):
        server = Server(system.server.url, system.model)
        under_test = SystemUnderTest(loadgen, server, IN_FLIGHT)
        under_test.wait(server.client.__aenter__())
        at_once = (2, 8) if args.device == "cpu" else (IN_FLIGHT, 2 * IN_FLIGHT, 4 * IN_FLIGHT)
        rates = []
        for n in at_once:  # the first ones warm up
            rates.append(under_test.rate(n))
            print(f"{n} at once: {rates[-1]:.3f} windows/s", flush=True)  # later steps may fail
        rate = max(rates)
        scenarios = under_test.scenarios(rate, args.seconds)
        under_test.wait(server.client.__aexit__())
        under_test.close()
    rows = []
    for scenario, found in scenarios.items():
        per_s, p99_s, says = figures(found)
        row = {"windows_per_s": per_s, "for each core": per_s / cores, "p99_s": p99_s}
        rows.append({"scenario": scenario, **row, "LoadGen says": says})
    print_table(rows)
    if args.device == "cpu":
        print(f"Intel's submission: {INTEL_PER_CORE:.3f} for each core, with AMX")
    else:
        print("; ".join(f"{what} {rate}" for what, rate in OTHERS.items()))
    if failures := server.failures:
        print(f"{len(failures)} requests failed, such as: {failures[0]}")
    machine = {**cpu_info(), **versions("torch"), "cores": cores}
    told = {"scenarios": scenarios, "ceiling": ceiling, "failed": len(failures)}
    kept = {"shape": args.shape, "dtype": args.dtype, "intel": INTEL_PER_CORE}
    where = {"device": args.device, "placement": args.placement}
    print_result("mlperf", {**machine, **kept, **where, **told})


def _ceiling(shape: ModelShape, device: str) -> tuple[float, str]:
    """Return the ceiling in windows/s, and what it is of."""
    if device == "cpu":
        rate = product_flops(torch.float32, shape) / window_flops(shape, TOKENS)
        return rate, "float32 products alone"
    rig = Rig(FULL, device, CACHE)
    rig.measure_rates()
    torch.cuda.empty_cache()  # the server sizes its pools by free memory
    return rig.gpu.windows_per_s(shape, TOKENS, IN_FLIGHT), "both engines without a server"


if __name__ == "__main__":
    main()
