"""The load generator: its arrivals, its audio, its slots, and the figures that it prints."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmark.serving import load as serve
from benchmark.serving.load import Speech, UniqueUploads, arrival_offsets, send_load
from benchmark.serving.load_metrics import Sent, parse_goodput, report_lines, summary
from benchmark.shared.bare_server import TEXT, bare_server
from benchmark.shared.clips import Clip
from benchmark.shared.openai_client import Outcome, Upload
from benchmark.shared.speech.wav import wav_bytes


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with bare_server() as server:
        yield server.url


class SlowClient:
    """Takes 5 ms a request, and knows how many it had at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def send(self, upload: Upload) -> Outcome:
        outcome = Outcome(start=asyncio.get_running_loop().time())
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.005)
        self.now -= 1
        return outcome


def make_sent(latency: float, ttft: float | None = None, failure: str = "") -> Sent:
    return Sent(5.0, Outcome(start=0.0, latency=latency, ttft=ttft, failure=failure))


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, spread: float) -> None:
    """The coefficient of variation of gamma gaps is 1 / sqrt(shape); Poisson's is 1."""
    offsets = arrival_offsets(4000, 20.0, burstiness, seed=1)
    gaps = [later - earlier for earlier, later in pairwise([0.0, *offsets])]
    assert offsets[-1] == pytest.approx(4000 / 20)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.15)


def test_no_two_requests_have_the_same_audio_and_none_differs_by_more_than_a_step() -> None:
    pcm = np.array([-32_768, 32_767, *range(200)], np.int16)
    make = UniqueUploads([Speech(Clip("a", b""), pcm)], {}, n=50, seed=0)
    heads = len(wav_bytes(pcm)) - pcm.nbytes
    bodies = [make(number).body for number in range(50)]
    audio = [body[(at := body.index(b"RIFF")) + heads : at + heads + pcm.nbytes] for body in bodies]
    assert len(set(audio)) == 50
    for samples in audio:
        assert np.abs(np.frombuffer(samples, np.int16).astype(int) - pcm).max() <= 2


async def test_a_closed_loop_fills_its_slots_and_no_more() -> None:
    client = SlowClient()
    outcomes = await send_load(client, lambda n: Upload(b"", ""), range(20), 3)  # type: ignore[arg-type]
    assert client.most == 3
    assert len(outcomes) == 20


async def test_with_a_rate_what_waits_for_a_slot_counts_as_client_queueing() -> None:
    client = SlowClient()
    outcomes = await send_load(
        client,  # type: ignore[arg-type]
        lambda n: Upload(b"", ""),
        range(20),
        1,
        offsets=[0.0] * 20,
    )
    assert client.most == 1
    assert outcomes[-1].queue > 19 * 0.004


def test_goodput_counts_what_keeps_every_limit() -> None:
    sent = [
        make_sent(1.0, 0.1),
        make_sent(3.0, 0.1),
        make_sent(1.0, 0.9),
        make_sent(9.0, None, "503"),
    ]
    figures = summary(sent, 2.0, parse_goodput(["ttft:500", "e2el:2000"]), [99.0])
    assert figures["request_goodput"] == 0.5
    assert figures["request_throughput"] == 1.5
    assert figures["rtfx"] == 7.5
    assert figures["failures"] == {"503": 1}


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "speed:3", "e2el:-1"])
def test_a_wrong_goodput_says_what_it_takes(pair: str) -> None:
    with pytest.raises(SystemExit, match="ttft:MS"):
        parse_goodput([pair])


def test_failures_stand_in_the_report_by_status() -> None:
    sent = [make_sent(1.0), make_sent(1.0, None, "503"), make_sent(1.0, None, "timeout")]
    lines = "\n".join(report_lines(summary(sent, 1.0, {}, [99.0]), ["ttft", "e2el"]))
    assert re.search(r"Failed requests: +2\n  503: +1\n  timeout: +1\n", lines)
    assert "TTFT" not in lines  # nothing streamed
    assert re.search(r"P99 E2EL \(ms\): +1000.00", lines)


def test_a_run_writes_vllms_file(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.wav").write_bytes(wav_bytes(np.zeros(1600, np.int16)))
    (tmp_path / "a.txt").write_text(TEXT)
    flags = ["--base-url", url, "--model", "org/name", "--folder", str(tmp_path)]
    flags += ["--max-concurrency", "4", "--num-prompts", "20", "--no-ceiling"]
    flags += ["--save-result", "--save-detailed", "--result-dir", str(tmp_path / "out")]
    assert serve.main(flags) == 0
    (file,) = (tmp_path / "out").iterdir()
    assert re.fullmatch(r"openai-audio-infqps-concurrency4-name-\d{8}-\d{6}\.json", file.name)
    content = json.loads(file.read_text())
    assert content["completed"] == 20
    assert len(content["ttfts"]) == len(content["latencies"]) == len(content["queue_times"]) == 20
    assert content["mean_ttft_ms"] <= content["mean_e2el_ms"]
    assert content["wer"] == 0.0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["request_throughput"] == content["request_throughput"]
