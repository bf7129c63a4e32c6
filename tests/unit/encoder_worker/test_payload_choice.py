"""The choice of what to hand over: right for the link, and calm."""

from __future__ import annotations

import random

import pytest

from cluster.kv.transfer_config import ReadReport
from cluster.messages import Payload
from encoder_worker.payload_choice import BETTER, N_READS, HandoffChoice

WINDOW_BYTES: dict[Payload, int] = {"cross_kv": 245_760_000, "encoder_states": 3_840_000}
PROJECTION_S = 0.0006  # large-v3 on an H200 at 65 % of its peak: 0.4 ms is the roofline
CROSSOVER = (245_760_000 - 3_840_000) / PROJECTION_S  # bytes/s: equal costs


def make_choice(projection_s: float = PROJECTION_S) -> HandoffChoice:
    return HandoffChoice(WINDOW_BYTES, projection_s)


def read(
    choice: HandoffChoice, bytes_per_s: float, n: int = N_READS, projection_s: float = 0.0
) -> None:
    """`n` windows of what is published at the time, over a link of that speed."""
    for _ in range(n):
        n_bytes = WINDOW_BYTES[choice.payload]
        choice.note(ReadReport(n_bytes, n_bytes / bytes_per_s, projection_s))


@pytest.mark.parametrize(
    ("link", "bytes_per_s", "expected"),
    [
        ("NVLink", 380e9, "cross_kv"),
        ("InfiniBand, 400 Gbit/s", 50e9, "encoder_states"),
        ("TCP, 100 Gbit/s", 10e9, "encoder_states"),
    ],
)
def test_links_get_what_suits_them(link: str, bytes_per_s: float, expected: Payload) -> None:
    choice = make_choice()
    assert choice.payload == "cross_kv"
    read(choice, bytes_per_s, n=N_READS - 1)
    assert choice.payload == "cross_kv"
    read(choice, bytes_per_s, n=200)
    assert choice.payload == expected, link


def test_a_slow_projection_keeps_kv() -> None:
    """A CPU moves 246 MB in 60 ms, and takes seconds to project them."""
    choice = make_choice(projection_s=3.0)
    read(choice, 4e9, n=100)
    assert choice.payload == "cross_kv"


def test_it_changes_and_changes_back_with_the_link() -> None:
    choice = make_choice()
    read(choice, 20e9)
    assert choice.payload == "encoder_states"
    read(choice, 20e9, n=100)
    read(choice, 3 * CROSSOVER)
    assert choice.payload == "cross_kv"
    read(choice, 20e9)
    assert choice.payload == "encoder_states"


@pytest.mark.parametrize("start_fast", [True, False])
def test_it_does_not_flap_at_the_crossover(start_fast: bool) -> None:
    """A link that wavers by 8 % about equal costs never pays a change, whichever it comes from."""
    choice = make_choice()
    if not start_fast:
        read(choice, 20e9)
    before = choice.payload
    rng = random.Random(1)
    for _ in range(2000):
        read(choice, CROSSOVER * rng.uniform(0.92, 1.08), n=1)
        assert choice.payload == before


def test_single_slow_reads_mean_nothing() -> None:
    choice = make_choice()
    for n in range(500):
        read(choice, 1e6 if n % 5 == 0 else 10 * CROSSOVER, n=1)
        assert choice.payload == "cross_kv"


def test_there_are_as_many_reads_between_two_changes() -> None:
    """However wild the link: a change is never followed by another at once."""
    choice = make_choice()
    rng = random.Random(2)
    last, since, n_changes = choice.payload, 0, 0
    for _ in range(3000):
        read(choice, CROSSOVER * 10 ** rng.uniform(-2, 2), n=1)
        since += 1
        if choice.payload != last:
            assert since >= N_READS
            last, since, n_changes = choice.payload, 0, n_changes + 1
    assert n_changes > 0


def test_the_decoders_projection_replaces_the_encoders() -> None:
    """A decoder's device may be slower: once it has told so, KV comes back, and stays."""
    choice = make_choice()
    read(choice, 50e9)
    assert choice.payload == "encoder_states"
    read(choice, 50e9, projection_s=0.1)
    assert choice.payload == "cross_kv"
    read(choice, 50e9, n=100)
    assert choice.payload == "cross_kv"


def test_a_change_needs_the_margin() -> None:
    """Just inside of it nothing changes, just outside it does."""
    kv_s = PROJECTION_S / (BETTER - WINDOW_BYTES["encoder_states"] / WINDOW_BYTES["cross_kv"])
    at_margin = WINDOW_BYTES["cross_kv"] / kv_s
    for factor, expected in ((1.01, "cross_kv"), (0.99, "encoder_states")):
        choice = make_choice()
        read(choice, factor * at_margin, n=100)
        assert choice.payload == expected


def test_reads_too_short_to_be_told_do_not_divide_by_zero() -> None:
    choice = make_choice()
    for _ in range(2 * N_READS):
        choice.note(ReadReport(WINDOW_BYTES["cross_kv"], 0.0, 0.0))
    assert choice.payload == "cross_kv"
