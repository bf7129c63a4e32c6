"""A plan for two machines of this machine's size: is it started, and does it keep its objective?

    python -m benchmark.planning.planned [--rate 1] [--slo "p95 < 1 s"] [--requests 60]

`splitscribe plan` plans from the profile `two-cores`, one encoder and one decoder on machines of
their own. What it writes is started by `splitscribe up` on hosts that are network namespaces of
this machine (sshd, `ray up`, the wheel and NIXL over TCP are real; needs root). Then requests of
5 s come at Poisson times. All hosts share the cores of this machine, of which the plan gives each
its own.

Prints what the plan expected beside what was measured, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import cpu_info, versions
from cluster.planning.plan.order import parse_objectives
from cluster.planning.report import percentile
from cluster.serve.distribution import package_root
from tests.support.hosts import NETWORK, Host, hosts, missing_for_hosts

URL = f"http://{NETWORK}.11:8000"
UP_S, LOAD_S = 500.0, 560.0
PERCENTILES = (50, 95, 99)


def wheel(folder: Path) -> Path:
    """As `make wheel` leaves it."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*build, str(package_root())], check=True)
    shutil.copy(package_root() / "constraints.txt", folder)
    return folder


def plan_and_start(operator: Host, args: argparse.Namespace) -> dict[str, Any]:
    """What an operator does. Returns the plan's figures."""
    operator.run("splitscribe/bin/pip install -q --no-deps --no-index dist/*.whl", UP_S)
    operator.run("echo 'export PATH=~/splitscribe/bin:$PATH' >> ~/.bashrc")
    print("planning", flush=True)
    operator.run(
        f"splitscribe plan --rate {args.rate}/s --slo {shlex.quote(args.slo)} "
        "--gpus two-cores:0.1 --cores 2 --links 10gbps --placement split --spare 0 -o plan",
        UP_S,
    )
    operator.run(
        "sed -i 's/10\\.0\\.0\\.12/NETWORK.13/; s/10\\.0\\.0\\.11/NETWORK.12/; "
        "s/10\\.0\\.0\\.10/NETWORK.11/; s/ssh_user: ubuntu/ssh_user: root/' "
        "plan/cluster.yaml".replace("NETWORK", NETWORK)
    )
    print("starting", flush=True)
    up = operator.run("splitscribe up plan/cluster.yaml --serve plan/serve.yaml", UP_S)
    assert f"ready at {URL}" in up.stdout + up.stderr, up.stdout + up.stderr
    figures: dict[str, Any] = json.loads((operator.home / "plan/plan.json").read_text())
    return figures


def measured(operator: Host, args: argparse.Namespace) -> dict[str, Any]:
    """Requests of 5 s at the planned rate, from the operator's host."""
    print(f"{args.requests} requests at {args.rate} a second", flush=True)
    operator.run(
        f"cd {package_root()} && {sys.executable} -m benchmark.serving.load --base-url {URL} "
        f"--request-rate {args.rate} --num-prompts {args.requests} --asr-max-audio-len-sec 10 "
        "--no-stream --no-ceiling --num-warmups 4 --save-result --save-detailed --result-dir ~",
        LOAD_S + args.requests / args.rate,
    )
    told = json.loads(next(operator.home.glob("*.json")).read_text())
    latencies = sorted(told["latencies"])
    return {
        "requests": len(latencies),
        "failed": sum(bool(error) for error in told["errors"]),
        **{f"p{one}_s": round(percentile(latencies, one), 4) for one in PERCENTILES},
        "latencies_s": [round(latency, 4) for latency in latencies],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--slo", default="p95 < 1 s")
    parser.add_argument("--requests", type=int, default=60)
    args = parser.parse_args()
    if (missing := missing_for_hosts()) is not None:
        raise SystemExit(missing)
    with tempfile.TemporaryDirectory() as folder:
        dist = wheel(Path(folder, "dist"))
        names = ("operator", "head", "encoder", "decoder")
        with hosts(Path(folder, "hosts"), *names) as (operator, *_):
            shutil.copytree(dist, operator.home / "dist")
            plan = plan_and_start(operator, args)
            found = measured(operator, args)
    expected = {f"p{one}_s": plan["expected"][f"p{one}_s"] for one in PERCENTILES}
    kept = {
        str(one): percentile(found["latencies_s"], one.percent) < one.seconds
        for one in parse_objectives(args.slo)
    }
    counts = {role: plan[role]["needed"] for role in ("encoders", "decoders")}
    print(f"planned {counts}, {plan['routers']} routers, {plan['proxies']} proxies")
    print(f"expected {expected}")
    print(f"measured { {name: value for name, value in found.items() if name != 'latencies_s'} }")
    print(f"kept {kept}")
    figures = {"plan": plan, "measured": found, "kept": kept, "load": psutil.getloadavg()}
    about = {"machine": cpu_info(), "versions": versions("ray", "torch")}
    print_result("planning.planned", {**about, **figures})


if __name__ == "__main__":
    main()
