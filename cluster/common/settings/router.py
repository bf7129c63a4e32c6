"""The settings of routers: API keys, limits and time budgets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cluster.common.settings.roles import (
    FrozenModel,
    Labels,
    Listener,
    LivePolicy,
    Switch,
    Texts,
    as_tuple,
)

SECRET_PREFIX = "ek_"  # of client secrets, which are sent as keys
# KEY, or NAME KEY. A key is printable ASCII, so that it can be sent in every way that clients know;
# its name stands for it in logs and metrics. No error shows an entry: it may be a key.
_ENTRY = re.compile(r"(?:([A-Za-z0-9_.@+-]{1,64})[ \t]+)?([!-~]+)")


def named_key(entry: str) -> tuple[str, str]:
    """Split an entry into its name, or "", and its key. Raises ValueError."""
    if not entry.strip():
        raise ValueError("an API key is empty; leave it out to serve without keys")
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise ValueError("an API key is printable ASCII without spaces, alone or after a name")
    name, key = found[1] or "", found[2]
    if key.startswith(SECRET_PREFIX):
        raise ValueError(f"an API key begins with {SECRET_PREFIX}, as client secrets do")
    if name and key.startswith("#"):
        raise ValueError("a comment behind an API key; it needs a line of its own")
    if len(name) > len(key):
        raise ValueError("an API key is shorter than its name; the name comes first, then the key")
    return name, key


def _checked_keys(entries: tuple[str, ...]) -> tuple[str, ...]:
    for entry in entries:
        named_key(entry)
    return entries


def _as_keys(value: Any) -> Any:
    return (value,) if value == "" else as_tuple(value)


ApiKeys = Annotated[tuple[str, ...], BeforeValidator(_as_keys), AfterValidator(_checked_keys)]


def _as_sent(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Browsers send an origin without the slash that an address bar shows behind it."""
    return tuple(origin.rstrip("/") for origin in origins)


class LiveSettings(FrozenModel):
    """Realtime sessions: their number, their length, how much audio may wait, and their updates."""

    max_sessions: int = Field(
        256,
        ge=0,
        description="sessions at once per router; more get a 429; 0: no realtime sessions",
    )
    max_sessions_per_key: int = Field(
        0,
        ge=0,
        description="sessions of one API key at once per router; more get a 429; 0: no limit",
    )
    max_session_s: float = Field(3600.0, gt=0, description="longest session")
    idle_timeout_s: float = Field(
        600.0,
        gt=0,
        description="time without an event of the client after which the session is closed",
    )
    max_event_bytes: int = Field(
        15_728_640, ge=1024, description="largest event of a client, in bytes"
    )
    max_unsent_s: float = Field(
        300.0, gt=0, description="seconds of audio of a session that may wait for its transcript"
    )
    policy: LivePolicy = Field(
        "auto",
        description="which words are final and are sent: attention_peak (words that attention has "
        "left), local_agreement (words that two updates agree on; slower), or auto (the second for "
        "checkpoints whose decoder has less than half as many layers as their encoder, the first "
        "for all others)",
    )
    min_hop_s: float = Field(
        0.5, ge=0.1, le=30, description="shortest time between two updates of a session, in seconds"
    )
    max_hop_s: float = Field(
        3.0,
        ge=0.1,
        le=30,
        description="longest time between them; if the workers need more, new sessions get a 503",
    )

    @model_validator(mode="after")
    def _hops_in_order(self) -> LiveSettings:
        if self.min_hop_s > self.max_hop_s:
            raise ValueError(
                f"live.min_hop_s ({self.min_hop_s}) must not exceed "
                f"live.max_hop_s ({self.max_hop_s})"
            )
        return self


class RouterSettings(FrozenModel):
    """The HTTP front: limits, workers for audio, time budgets."""

    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0 takes a free one")
    listener: Listener = Field(
        "router",
        description="what listens there: router (the router's replicas) or serve (Ray Serve's "
        "proxies)",
    )
    api_key: ApiKeys = Field(
        (),
        repr=False,
        description="API keys, one of which clients must send as bearer token; a text or a list, "
        "each KEY or NAME KEY",
    )
    api_key_file: Path | None = Field(
        None,
        description="file with more API keys, KEY or NAME KEY in each line; a line with # in front "
        "is a comment",
    )
    max_requests_per_key: int = Field(
        0,
        ge=0,
        description="requests of one API key at once per router; more get a 429; 0: no limit",
    )
    max_requests_per_minute: int = Field(
        0,
        ge=0,
        description="requests and sessions that one API key may begin in a minute, per router; "
        "more get a 429; 0: no limit",
    )
    max_audio_hours_per_day: float = Field(
        0.0,
        ge=0,
        description="hours of audio of one API key in a day (UTC), per router since its start; "
        "then 429; 0: no limit",
    )
    cors_origins: Annotated[Texts, AfterValidator(_as_sent)] = Field(
        (), description="web origins whose pages may call the API, or '*'; empty: none"
    )
    hosts: Texts = Field(
        (),
        description="names by which clients call the server (Host): NAME, *.DOMAIN or '*'. Other "
        "names get a 421, except localhost, addresses and the machine's name; with API keys and "
        "an empty list, all names are served",
    )
    asr_webservice: bool = Field(
        False,
        description="also answer /asr and /detect-language, as whisper-asr-webservice does",
    )
    page: Switch = Field(
        "auto",
        description="the web page at GET / to try the server: on, off, or auto (on without API "
        "keys); with API keys and on, the page's files are public, and it asks for a key",
    )
    metrics: Switch = Field(
        "auto",
        description="GET /metrics for Prometheus: on, off, or auto (on, and needs a key where "
        "there are API keys)",
    )
    replicas: int = Field(1, ge=1, description="router replicas")
    cpus: float = Field(0.0, ge=0, description="CPUs of its node that each replica reserves in Ray")
    node_labels: Labels = Field(
        {}, description="Ray's labels of the nodes to run on: LABEL: VALUE; empty: any node"
    )
    max_upload_bytes: int = Field(26_214_400, ge=1, description="largest upload, in bytes")
    max_audio_s: float = Field(4 * 3600.0, gt=0, description="longest audio, in seconds")
    min_audio_s: float = Field(0.1, ge=0, description="shortest audio, in seconds")
    max_pending_audio_s: float = Field(
        8 * 3600.0,
        gt=0,
        description="seconds of audio admitted at once; more requests get a 429. A router admits "
        "less while requests wait in queues for more than a minute",
    )
    audio_workers: int = Field(
        0,
        ge=0,
        description="processes that decode uploads; 0: half of the cores, from 2 to 8. All but "
        "the first start only when there are more uploads than processes",
    )
    audio_timeout_s: float = Field(
        120.0, gt=0, description="most processor time to decode one upload, in seconds"
    )
    audio_memory_mb: int = Field(1024, ge=128, description="most memory of one audio worker, in MB")
    max_windows_in_flight: int = Field(
        8, ge=1, description="windows of one request that are worked on at the same time"
    )
    stall_timeout_s: float = Field(
        600.0,
        gt=0,
        description="requests end with a 504 when no window of their model has been finished for "
        "so many seconds; while windows are, they may take as long as they need",
    )
    max_attempts: int = Field(8, ge=1, description="most tries of one window when workers fail")
    openai_aliases: bool = Field(
        True,
        description="the model that whisper-1 means also has OpenAI's newer names, such as "
        "gpt-transcribe and gpt-live-transcribe, which some clients require",
    )
    list_openai_aliases: bool = Field(
        False, description="GET /v1/models also lists these names and whisper-1"
    )
    live: LiveSettings = LiveSettings()

    @property
    def shows_page(self) -> bool:
        with_keys = bool(self.api_key or self.api_key_file)
        return self.page == "on" or (self.page == "auto" and not with_keys)

    @model_validator(mode="after")
    def _limit_needs_keys(self) -> RouterSettings:
        if self.live.max_sessions_per_key and not self.api_key and not self.api_key_file:
            raise ValueError("live.max_sessions_per_key needs api_key or api_key_file")
        for name in ("max_requests_per_key", "max_requests_per_minute", "max_audio_hours_per_day"):
            if getattr(self, name) and not self.api_key and not self.api_key_file:
                raise ValueError(f"{name} needs api_key or api_key_file")
        return self
