"""Real servers whose devices only wait: for the comparison of a simulation with what it simulates.

    python -m benchmark.planning.timed_workers --profile FILE [--encoders 1] [--decoders 1]

Serves until Ctrl-C and prints `ready at URL`, as `splitscribe serve` does. Router, Ray Serve,
queues, pages, leases, NIXL and all threads are the real ones. The forward of a model is a wait that
takes what the profile says, without using a core; the decoder gives tokens by the audio's length.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from functools import partial
from typing import Any

from benchmark.shared.command import make_parser
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import RouterSettings, Settings
from cluster.planning.profile import Profile, load_profile
from cluster.planning.roles import Texts, WaitingForward, WaitingRunner
from cluster.planning.scenario import LoadRequest
from cluster.planning.worker import Device
from cluster.serve.app import HEALTH_PERIOD_S, HEALTH_TIMEOUT_S, http_front, replica_choice
from cluster.serve.placement import Placement
from cluster.serve.replicas.decoder_replica import DecoderReplica
from cluster.serve.replicas.encoder_replica import EncoderReplica
from cluster.serve.replicas.router_replica import Router
from cluster.serve.start.launch import running_cluster
from decoder_worker.scheduling.sequence import DecodeSequence
from router.http.admission import MAX_REQUESTS

TOKENS_PER_S = 3.2  # as the lengths of a scenario have it


class RealClock:
    """In the place of a simulated worker's clock: it waits."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, at_s: float) -> None:
        if (wait_s := at_s - time.monotonic()) > 0:
            time.sleep(wait_s)


class UsualTexts(Texts):
    """Of requests that nobody has told of: as many tokens as their audio usually has."""

    def n_tokens(self, sequence: DecodeSequence) -> int:
        request = LoadRequest("", 0.0, 0.0, "interactive", TOKENS_PER_S, ())
        return request.n_tokens(sequence.request.content_frames)


class TimedEncoder(EncoderReplica):
    """A real encoder replica; its device is replaced when its thread runs already."""

    def __init__(self, settings: Settings, build: str, profile: Profile) -> None:
        super().__init__(settings, build)
        clock: Any = RealClock()
        loop: Any = self._engine._loops[0]
        loop.forward.close()
        forward: Any = WaitingForward(profile, Device(), clock)
        loop.forward = forward


class TimedDecoder(DecoderReplica):
    """The same of a decoder."""

    def __init__(self, settings: Settings, build: str, profile: Profile) -> None:
        super().__init__(settings, build)
        clock: Any = RealClock()
        tokenizer = WhisperTokenizer.from_checkpoint(open_checkpoint(settings.model, weights=False))
        runner: Any = WaitingRunner(profile, UsualTexts(tokenizer, {}), Device(), clock)
        loop: Any = self._engine._loop
        loop._runner = loop._launches._runner = runner


def build_timed(
    args: argparse.Namespace, profile: Profile, settings: Settings, build: str, placement: Placement
) -> Any:
    """As `cluster.serve.app.build_app`, with devices that wait."""
    from ray import serve

    deployment: Any = serve.deployment
    common = {
        "ray_actor_options": {"num_cpus": 0},
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
    }
    workers = {
        role: deployment(
            worker,
            name=role,
            num_replicas=n,
            max_ongoing_requests=most,
            **replica_choice(),
            **common,
        ).bind(settings, build, profile)
        for role, worker, n, most in (
            ("encoder", TimedEncoder, args.encoders, 4 * profile.encoder.max_batch),
            ("decoder", TimedDecoder, args.decoders, settings.decoder.max_waiting + 16),
        )
    }
    front = {"name": "router", "max_ongoing_requests": MAX_REQUESTS, **common}
    name = next(iter(settings.by_model()))
    return deployment(http_front(Router, settings), **front).bind(
        settings, build, {name: workers["encoder"]}, {name: workers["decoder"]}
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--encoders", type=int, default=1)
    parser.add_argument("--decoders", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    profile = load_profile(args.profile)  # before this process goes to another folder
    settings = Settings.model_validate(
        {
            "router": RouterSettings(port=args.port),
            "encoder": {"context": "full", "cache": False, "max_batch": 1},
            "log_level": "WARNING",
        }
    )
    stop = threading.Event()
    with running_cluster(settings, build=partial(build_timed, args, profile)) as cluster:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        print(f"ready at {cluster.url}", flush=True)
        stop.wait()


if __name__ == "__main__":
    from benchmark.planning import timed_workers  # so that replicas import its classes by name

    timed_workers.main()
