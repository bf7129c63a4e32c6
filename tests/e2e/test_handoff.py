"""What is handed from encoder to decoder is a matter of speed: both modes give the same answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from cluster.demo.samples import SAMPLES, sample_path
from tests.e2e.conftest import Server, start_server, stop_server, wait_until
from tests.support.in_process import in_process_server

MODES = ("cross_kv", "encoder_states")
FLOAT32 = {"device": "cpu", "dtype": "float32"}
# Of one window of the bundled model in float32: `medium` takes 1280 of 1500 positions.
KV_BYTES, STATES_BYTES = 6_912_000 * 1280 // 1500, 1_152_000 * 1280 // 1500


def answer(client: openai.OpenAI, name: str) -> tuple[dict[str, Any], int]:
    """Without probabilities, whose last digits depend on a process's threads and batches."""
    raw = client.audio.transcriptions.with_raw_response.create(
        model="whisper-1",
        file=sample_path(name),
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    timing = raw.headers["server-timing"]
    n_bytes = re.search(r'transfer;dur=\S+;desc="(\d+) bytes"', timing)
    n_windows = re.search(r'encode;dur=\S+;desc="(\d+) windows?"', timing)
    assert n_bytes is not None
    assert n_windows is not None
    heard = raw.parse().to_dict()
    for segment in heard["segments"]:
        del segment["avg_logprob"], segment["no_speech_prob"]
    return heard, int(n_bytes[1]) // int(n_windows[1])


def in_process(mode: str, names: Sequence[str]) -> list[tuple[dict[str, Any], int]]:
    with in_process_server({"handoff": mode, "encoder": FLOAT32, "decoder": FLOAT32}) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        return [answer(client, name) for name in names]


def test_every_mode_gives_the_same_answer() -> None:
    expected = None
    for mode in MODES:
        ((found, n_bytes),) = in_process(mode, ["medium"])
        assert n_bytes == (STATES_BYTES if mode == "encoder_states" else KV_BYTES)
        expected = expected or found
        assert found["words"]
        assert found == expected, mode


@pytest.fixture(scope="module", params=MODES)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    running = start_server(
        tmp_path_factory.mktemp("cwd"),
        *("--encoders", "2", "--decoders", "2", "--dtype", "float32"),
        env={"SPLITSCRIBE_HANDOFF": request.param},
    )
    yield running
    assert stop_server(running) == 0, running.output()[-4000:]


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[dict[str, Any], int]]:
    return dict(zip(SAMPLES, in_process("cross_kv", SAMPLES), strict=True))


@pytest.mark.slow
def test_a_cluster_gives_the_same_answer_in_every_mode(
    cluster: Server, expected: dict[str, tuple[dict[str, Any], int]]
) -> None:
    for name in SAMPLES:
        heard, kv_bytes = expected[name]
        for _ in range(4):
            found, n_bytes = answer(cluster.client(), name)
            assert found == heard
            assert n_bytes in (kv_bytes, kv_bytes * STATES_BYTES // KV_BYTES)
    wait_until(cluster.is_idle, 30, "every page free")
    workers = cluster.workers("encoder") + cluster.workers("decoder")
    assert all(worker["transport"].startswith("nixl") for worker in workers)
