"""The load generator against a real cluster: a smoke test of both."""

from __future__ import annotations

import json

import pytest

from benchmark.serving import load as serve
from tests.e2e.conftest import Server


def test_a_short_load_succeeds_and_every_word_is_right(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Distinct audio, streamed, two in flight: no failure, no word wrong, times in order."""
    flags = ["--url", server.url, "--asr-max-audio-len-sec", "10", "--max-concurrency", "2"]
    flags += ["--num-prompts", "4", "--num-warmups", "1", "--no-ceiling"]
    assert serve.main([*flags, "--goodput", "e2el:600000"]) == 0
    output = capsys.readouterr().out
    assert "RTFx (Inverse Real-Time Factor):" in output
    result = json.loads(output.splitlines()[-1])
    assert (result["completed"], result["failed"], result["wer"]) == (4, 0, 0.0)
    assert result["request_goodput"] == result["request_throughput"]
    assert result["tokens_counted_by"] == "server"
    assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"]
