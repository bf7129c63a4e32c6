"""Real servers whose devices only wait: for the comparison of a simulation with what it simulates.

    python -m benchmark.planning.timed_workers --profile FILE [--encoders 1] [--decoders 1]

Serves until Ctrl-C and prints `ready at URL`, as `splitscribe serve` does. Router, Ray Serve,
queues, pages, leases, NIXL and all threads are the real ones. The forward of a model is a wait that
takes what the profile says, without using a core; the decoder gives tokens by the audio's length.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

from benchmark.shared.command import make_parser
from benchmark.shared.own_server import pool, serve_until_signal, with_router
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import RouterSettings, Settings
from cluster.planning.profile import Profile, load_profile
from cluster.planning.roles import Texts, WaitingForward, WaitingRunner
from cluster.planning.scenario import LoadRequest
from cluster.planning.worker import Device
from cluster.serve.placement import Placement
from cluster.serve.replicas.decoder_replica import DecoderReplica
from cluster.serve.replicas.encoder_replica import EncoderReplica
from decoder_worker.scheduling.sequence import DecodeSequence

TOKENS_PER_S = 3.2  # as the lengths of a scenario have it


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, at_s: float) -> None:
        if (wait_s := at_s - time.monotonic()) > 0:
            time.sleep(wait_s)


class UsualTexts(Texts):
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
    workers = {
        role: pool(worker, role, n, most).bind(settings, build, profile)
        for role, worker, n, most in (
            ("encoder", TimedEncoder, args.encoders, 4 * profile.encoder.max_batch),
            ("decoder", TimedDecoder, args.decoders, settings.decoder.max_waiting + 16),
        )
    }
    return with_router(settings, build, workers)


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
    serve_until_signal(settings, partial(build_timed, args, profile))


if __name__ == "__main__":
    from benchmark.planning import timed_workers  # so that replicas import its classes by name

    timed_workers.main()
