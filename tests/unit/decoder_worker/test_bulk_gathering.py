"""Bulk sequences wait for others that share their steps, and nobody else waits for them."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoints import cached_checkpoint
from tests.support.workers.decoder_engines import ANSWER_S, make_stand


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached_checkpoint()


def test_clips_are_decoded_while_bulk_sequences_gather(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoder_worker.loop.GATHER_S", 10 * ANSWER_S)
    more = threading.Event()
    more.set()
    with make_stand(folder, more_bulk=more.is_set) as stand:
        bulk = stand.engine.submit(replace(stand.request(0), priority="bulk"))
        clip = stand.engine.submit(stand.request(1)).result(ANSWER_S)
        assert clip.tokens
        assert not bulk.done()
        more.clear()
        assert bulk.result(ANSWER_S).tokens
        stand.assert_all_returned()


def test_enough_bulk_sequences_step_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four rows are for them."""
    monkeypatch.setattr("decoder_worker.loop.GATHER_S", 10 * ANSWER_S)
    with make_stand(folder, more_bulk=lambda: True, bulk_share=0.5) as stand:
        requests = [replace(stand.request(n), priority="bulk") for n in range(2)]
        futures = [stand.engine.submit(request) for request in requests]
        done, _ = wait(futures, ANSWER_S, FIRST_COMPLETED)
        assert done


def test_a_wait_for_others_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoder_worker.loop.GATHER_S", 0.01)
    with make_stand(folder, more_bulk=lambda: True) as stand:
        bulk = stand.engine.submit(replace(stand.request(0), priority="bulk"))
        assert bulk.result(ANSWER_S).tokens
        stand.assert_all_returned()
