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

import httpx
import psutil

from cluster.common.errors import ConfigurationError
from cluster.demo.samples import sample_path
from cluster.planning.profile import AudioProfile, RouterProfile

SHORT_S, MEDIUM_S = 5.0, 25.0  # of the two samples, about; the rate is taken between them
FIRST = 3  # requests that warm up
CALLS = 2  # of a window: one of each role
STAGE = re.compile(r"(\w+);dur=([\d.]+)")
ROUTER = "ServeReplica:splitscribe:router"
RAY_NODE = "raylet"


def time_server(
    url: str, rounds: int, api_key: str | None, tell: Callable[[str], None]
) -> tuple[RouterProfile, AudioProfile]:
    """What a request costs a router and its audio workers.

    Raises:
        ConfigurationError: no server of ours answers there.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=url, timeout=120.0, headers=headers) as client:
            client.get("/health").raise_for_status()
            routers = _routers_at(url)
            if not routers:
                tell("server: its router is not to be seen on this machine: its time is estimated")
            cpu_s, rest_s, short_s = _time(client, "short", rounds, routers)
            _, _, medium_s = _time(client, "medium", rounds, routers)
    except (httpx.HTTPError, KeyError) as error:
        raise ConfigurationError(f"cannot measure the server at {url}: {error!r}") from error
    tell(f"server: {1000 * rest_s:.1f} ms of a request beside its stages")
    per_s = max(0.0, (medium_s - short_s) / (MEDIUM_S - SHORT_S))
    cpu_s = min(cpu_s, rest_s) if routers else rest_s / 2
    router = RouterProfile(request_s=cpu_s, window_s=0.0, hop_s=(rest_s - cpu_s) / CALLS)
    audio_s = max(0.0, short_s - per_s * SHORT_S)
    return router, AudioProfile(request_s=audio_s, audio_second_s=per_s)


def _time(
    client: httpx.Client, name: str, rounds: int, routers: list[psutil.Process]
) -> tuple[float, float, float]:
    """The router's processor seconds, and medians: beside all stages, and of the stage `audio`."""
    audio = sample_path(name).read_bytes()
    rests, audios, before_s = [], [], 0.0
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
        header = answer.headers["server-timing"]
        told = {stage: float(ms) / 1000 for stage, ms in STAGE.findall(header)}
        rests.append(max(0.0, seconds - (sum(told.values()) - told["total"])))
        audios.append(told["audio"])
    cpu_s = (_cpu_s(routers) - before_s) / rounds
    return cpu_s, statistics.median(rests[FIRST:]), statistics.median(audios[FIRST:])


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
        above = [parent for pid in listeners if pid for parent in psutil.Process(pid).parents()]
        nodes = {parent for parent in above if parent.name() == RAY_NODE}
        below = (process for node in nodes for process in node.children(recursive=True))
        return [process for process in below if ROUTER in " ".join(process.cmdline())]
    except psutil.Error:
        return []


def _cpu_s(routers: list[psutil.Process]) -> float:
    """Processor seconds of these routers."""
    times = [router.cpu_times() for router in routers]
    return sum(one.user + one.system for one in times)
