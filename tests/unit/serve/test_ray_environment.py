"""What a process sets before it joins a Ray cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.serve.ray_environment import ENVIRONMENT, joining_environment


@pytest.mark.parametrize("has_token", [True, False])
def test_the_token_is_sent_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_token: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("0123")
    environment = joining_environment()
    assert environment.pop("RAY_AUTH_MODE", None) == ("token" if has_token else None)
    assert environment == ENVIRONMENT
