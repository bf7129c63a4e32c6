"""Times requests of a running server: what its router and its audio workers take.

Requests go one at a time, so that nothing waits. Their `server-timing` says what each stage took;
the rest of the time is the router's and the calls'. Where the server's processes run on this
machine, the router's processor time is read from the system, else that rest is divided in halves.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import psutil

from cluster.demo.samples import sample_path
from cluster.errors import ConfigurationError
from cluster.planning.profile import AudioProfile, RouterProfile

SAMPLE_S = {"short": 5.0, "medium": 25.0}  # about; the rate is taken between the two
FIRST = 3  # requests that warm up
CALLS = 2  # of a window: one of each role
STAGE = re.compile(r"(\w+);dur=([\d.]+)")
ROUTER = "ServeReplica:splitscribe:router"
RAY_NODE = "raylet"
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """What requests of one length took, in seconds: medians, and processor time of the router."""

    total_s: float
    stages_s: float
    audio_s: float
    cpu_s: float | None


def time_server(
    url: str, rounds: int, api_key: str | None, tell: Tell
) -> tuple[RouterProfile, AudioProfile]:
    """What a request costs a router and its audio workers.

    Raises:
        ConfigurationError: no server of ours answers there.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    found = {}
    try:
        with httpx.Client(base_url=url, timeout=120.0, headers=headers) as client:
            client.get("/health").raise_for_status()
            routers = _routers_at(url)
            if not routers:
                tell("server: its router is not to be seen on this machine: its time is estimated")
            for name in SAMPLE_S:
                found[name] = _time(client, name, rounds, routers)
                tell(f"server: {name} recording in {1000 * found[name].total_s:.1f} ms")
    except (httpx.HTTPError, KeyError) as error:
        raise ConfigurationError(f"cannot measure the server at {url}: {error!r}") from error
    short, medium = found["short"], found["medium"]
    span_s = SAMPLE_S["medium"] - SAMPLE_S["short"]
    per_s = max(0.0, (medium.audio_s - short.audio_s) / span_s)
    audio_s = max(0.0, short.audio_s - per_s * SAMPLE_S["short"])
    rest_s = max(0.0, short.total_s - short.stages_s)
    cpu_s = rest_s / 2 if short.cpu_s is None else min(short.cpu_s, rest_s)
    router = RouterProfile(request_s=cpu_s, window_s=0.0, hop_s=(rest_s - cpu_s) / CALLS)
    return router, AudioProfile(request_s=audio_s, audio_second_s=per_s)


def _time(
    client: httpx.Client, name: str, rounds: int, routers: list[psutil.Process]
) -> ServerFigures:
    audio = sample_path(name).read_bytes()
    totals, stages, audios = [], [], []
    before_s: float | None = None
    for number in range(FIRST + rounds):
        if number == FIRST:
            before_s = _cpu_s(routers)
        began = time.perf_counter()
        answer = client.post(
            "/v1/audio/transcriptions",
            files={"file": (f"{number}.flac", audio)},
            data={"model": "whisper-1", "language": "en"},
        )
        answer.raise_for_status()
        seconds = time.perf_counter() - began
        if number >= FIRST:
            told = {
                stage: float(ms) / 1000
                for stage, ms in STAGE.findall(answer.headers["server-timing"])
            }
            totals.append(seconds)
            stages.append(sum(told.values()) - told["total"])
            audios.append(told["audio"])
    after_s = _cpu_s(routers)
    cpu_s = None if before_s is None or after_s is None else (after_s - before_s) / rounds
    total_s, stages_s, audio_s = (statistics.median(one) for one in (totals, stages, audios))
    return ServerFigures(total_s, stages_s, audio_s, cpu_s)


def _routers_at(url: str) -> list[psutil.Process]:
    """The routers of the server that listens there, if it runs on this machine.

    They are processes of the same Ray node as whoever listens, so that routers of other servers on
    this machine are left out.
    """
    port = httpx.URL(url).port
    try:
        listeners = {
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
        }
        nodes = [
            parent
            for pid in listeners
            if pid is not None
            for parent in psutil.Process(pid).parents()
            if parent.name() == RAY_NODE
        ]
        return [
            process
            for node in nodes
            for process in node.children(recursive=True)
            if ROUTER in " ".join(process.cmdline())
        ]
    except psutil.Error:
        return []


def _cpu_s(routers: list[psutil.Process]) -> float | None:
    """Processor seconds of these routers; None where there are none."""
    times = [router.cpu_times() for router in dict.fromkeys(routers)]
    return sum(one.user + one.system for one in times) if times else None
