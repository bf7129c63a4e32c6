"""Settings of the router: HTTP, audio workers, time limits, and realtime sessions."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from cluster.common.settings.base import FrozenModel, Labels, Listener, LivePolicy, Page, Texts


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
    max_session_s: float = Field(
        3600.0, gt=0, description="longest session; a warning comes 30 s before its end"
    )
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
        description="which words will not change and are sent: attention_peak (words at which "
        "attention no "
        "longer looks), local_agreement (words that two updates agree on; slower), or auto (the "
        "second for checkpoints whose decoder has less than half as many layers as their encoder, "
        "the first for all others)",
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
        "auto",
        description="what listens there: router (the router's replicas; one machine only), "
        "serve (Ray Serve's proxies), or auto",
    )
    api_key: Texts = Field(
        (),
        repr=False,
        description="API keys, one of which clients must send as bearer token; a text or a list",
    )
    api_key_file: Path | None = Field(
        None, description="file with more API keys, one in each line; # begins a comment"
    )
    max_requests_per_key: int = Field(
        0,
        ge=0,
        description="requests of one API key at once per router; more get a 429; 0: no limit",
    )
    cors_origins: Texts = Field(
        (), description="web origins whose pages may call the API, or '*'; empty: none"
    )
    asr_webservice: bool = Field(
        False,
        description="also answer /asr and /detect-language, as whisper-asr-webservice does",
    )
    page: Page = Field(
        "auto",
        description="the web page at GET / to try the server: on, off, or auto (on without API "
        "keys); with "
        "API keys and on, the page's files are public, and it asks for a key",
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
        "less while requests wait for more than 0.4 of their deadlines",
    )
    audio_workers: int = Field(
        2,
        ge=1,
        description="processes that decode uploads; all but the first start only when there are "
        "more "
        "uploads than processes",
    )
    audio_timeout_s: float = Field(
        120.0, gt=0, description="longest time to decode one upload, in seconds"
    )
    audio_memory_mb: int = Field(1024, ge=128, description="most memory of one audio worker, in MB")
    max_windows_in_flight: int = Field(
        8, ge=1, description="windows of one request that are worked on at the same time"
    )
    min_deadline_s: float = Field(
        120.0, gt=0, description="shortest deadline of a request, in seconds"
    )
    deadline_factor: float = Field(
        1.0, gt=0, description="deadline in seconds for each second of audio"
    )
    max_deadline_s: float = Field(
        600.0, gt=0, description="longest deadline of a request, in seconds"
    )
    max_attempts: int = Field(8, ge=1, description="most tries of one window when workers fail")
    openai_aliases: bool = Field(
        True,
        description="the first model also has the names gpt-4o-transcribe, gpt-4o-mini-transcribe, "
        "gpt-transcribe, gpt-realtime-whisper and gpt-live-transcribe, which some clients require",
    )
    list_openai_aliases: bool = Field(
        False, description="GET /v1/models also lists these names and whisper-1"
    )
    live: LiveSettings = LiveSettings()

    @property
    def shows_page(self) -> bool:
        """Whether `GET /` is there: `auto` shows it where everyone may call the API anyway."""
        with_keys = bool(self.api_key or self.api_key_file)
        return self.page == "on" or (self.page == "auto" and not with_keys)

    @model_validator(mode="after")
    def _limit_needs_keys(self) -> RouterSettings:
        if self.live.max_sessions_per_key and not self.api_key and not self.api_key_file:
            raise ValueError("live.max_sessions_per_key needs api_key or api_key_file")
        if self.max_requests_per_key and not self.api_key and not self.api_key_file:
            raise ValueError("max_requests_per_key needs api_key or api_key_file")
        return self
