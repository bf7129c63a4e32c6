"""`splitscribe profile --url` against a running server: its router and its audio workers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cluster.planning.measure import USUAL_AUDIO, USUAL_ROUTER
from cluster.planning.profile import load_profile
from tests.e2e.conftest import SPLITSCRIBE, Server

MEASURE_S = 500.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_profile_of_a_server_has_its_routers_times_and_can_be_simulated(
    server: Server, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    command = [SPLITSCRIBE, "profile", "--url", server.url, "--rounds", "3", "-o", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=MEASURE_S, check=False)
    assert run.returncode == 0, run.stderr
    profile = load_profile(str(file))
    assert f"measured at {server.url}" in profile.source
    assert profile.router != USUAL_ROUTER
    assert profile.audio != USUAL_AUDIO
    assert 0 < profile.router.request_s < 1.0
    assert 0 <= profile.router.hop_s < 1.0
    assert 0 < profile.audio.request_s + profile.audio.audio_second_s < 1.0
    simulate = [SPLITSCRIBE, "simulate", "--profile", str(file), "--rate", "1", "--seconds", "10"]
    told = subprocess.run(simulate, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    assert "profile mine (measured)" in told.stdout


def test_a_url_without_a_server_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    command = [SPLITSCRIBE, "profile", "--url", "http://127.0.0.1:9", "-o", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode != 0
    assert "cannot measure the server at http://127.0.0.1:9" in run.stderr + run.stdout
    assert not file.exists()
