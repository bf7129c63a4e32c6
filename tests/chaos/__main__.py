"""Faults under load, one after another, on a real cluster on this machine.

    python -m tests.chaos                              # every fault once
    python -m tests.chaos --faults 'kill encoder' 'freeze decoder'
    python -m tests.chaos --faults --pairs 10 --seed 1 # random pairs; with no --faults, after them
    python -m tests.chaos --hosts                      # on four hosts: network, nodes, redeploys
    python -m tests.chaos --kept                       # while kept KV is evicted and asked for
    python -m tests.chaos --soak 3600                  # random faults for an hour
    python -m tests.chaos --live-soak 3600             # live sessions for an hour, without faults

Needs two idle cores. Ends with one JSON line; status 1 when a text was wrong, a request lost, a
worker not replaced or something left over; with --kept also when nothing was found or evicted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.chaos.campaign import Outcome, run_faults, table
from tests.chaos.faults import kept_faults, random_pairs, single_faults
from tests.chaos.host_faults import host_faults
from tests.chaos.load import TIGHT, steady_load
from tests.chaos.several_hosts import several_hosts
from tests.chaos.soak import MAX_GROWTH, live_soak, soak
from tests.chaos.target import local_target


def make_parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", nargs="*", help="names, as the table has them; none: no single")
    parser.add_argument("--pairs", type=int, default=0, help="random pairs after the single ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s")
    parser.add_argument("--hosts", action="store_true", help="four hosts in network namespaces")
    parser.add_argument("--kept", action="store_true", help="small export pools, repeated audio")
    parser.add_argument("--folder", type=Path, help="of --hosts: where their files stay")
    parser.add_argument("--soak", type=float, metavar="SECONDS")
    parser.add_argument("--live-soak", type=float, metavar="SECONDS")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    random.seed(args.seed)
    if args.live_soak:
        found = live_soak(args.live_soak)
        print(json.dumps(found))
        is_flat = (found["memory_per_hour"] or 0.0) < MAX_GROWTH
        return 0 if is_flat and not found["bad"] and not found["left_over"] else 1
    if args.soak:
        run = soak(args.soak, seed=args.seed, rate=args.rate)
        print(run.line())
        print(json.dumps({"soak": asdict(run)}))
        return 1 if run.bad else 0
    faults = host_faults() if args.hosts else kept_faults() if args.kept else single_faults()
    if args.faults is not None:
        faults = [one for one in faults if one.name in args.faults]
    faults += random_pairs(args.pairs, args.seed)
    outcomes: list[Outcome] = []
    with (
        several_hosts(args.folder)
        if args.hosts
        else local_target(env=TIGHT if args.kept else None) as target,
        steady_load(target.url, args.rate, kept=args.kept) as load,
    ):
        for outcome in run_faults(faults, target, load):
            outcomes.append(outcome)
            print(table([outcome]), flush=True)
    print(table(outcomes))
    print(json.dumps({"chaos": [asdict(one) for one in outcomes]}))
    is_good = all(one.is_good and (not args.kept or one.hits * one.evicted) for one in outcomes)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
