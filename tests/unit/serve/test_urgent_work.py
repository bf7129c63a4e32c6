"""What processes of one machine tell each other of urgent work, and when bulk work may go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.serve.urgent_work import PATIENCE_S, BulkGate, UrgentWork


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.serve.urgent_work.LOOK_S", 0.0)


def test_work_of_one_process_is_seen_by_the_others_and_by_itself(tmp_path: Path) -> None:
    one, other = UrgentWork(tmp_path, 2), UrgentWork(tmp_path, 2)
    assert one.leaves_cores()
    assert other.leaves_cores()
    with one.during(2):
        assert not one.leaves_cores()
        assert not one.leaves_process()
        assert not other.leaves_cores()
        with one.during(1):
            pass
        assert not other.leaves_cores()
    assert other.leaves_cores()
    one.close()
    other.close()
    assert not tmp_path.exists()


def test_a_slot_that_is_not_whole_yet_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while a neighbour makes its own, nor if it leaves an empty one."""
    work = UrgentWork(tmp_path, 2)
    seen: list[bool] = []
    real = Path.write_bytes

    def write_bytes(path: Path, content: bytes) -> int:
        path.touch()
        seen.append(work.leaves_cores())
        return real(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", write_bytes)
        other = UrgentWork(tmp_path, 2)
    assert seen == [True]
    own = other._name
    (tmp_path / f"{own.rpartition('-')[0]}-empty").touch()
    with other.during(2):
        assert not work.leaves_cores(), "the others are heard all the same"


def test_bulk_windows_that_are_encoded_on_all_cores_are_told(tmp_path: Path) -> None:
    one, other = UrgentWork(tmp_path, 4), UrgentWork(tmp_path, 4)
    assert not other.bulk_is_encoded()
    one.encode_bulk(3)
    assert not other.bulk_is_encoded(), "a core is left"
    other.encode_bulk(2)
    assert one.bulk_is_encoded()
    assert other.bulk_is_encoded()
    assert other.leaves_cores(), "it is not urgent"
    with one.during(4):
        one.encode_bulk(0)
        assert not other.leaves_cores()
    assert not other.bulk_is_encoded()


def test_bulk_work_may_run_while_others_use_less_than_half_of_the_cores(tmp_path: Path) -> None:
    work = UrgentWork(tmp_path, 8)
    with work.during(3):
        assert work.leaves_cores()
        with work.during(1):
            assert not work.leaves_cores()
    assert work.leaves_cores()


def test_what_a_process_left_that_was_killed_counts_for_nothing(tmp_path: Path) -> None:
    work = UrgentWork(tmp_path, 2)
    code = (
        "import sys; from pathlib import Path; from cluster.serve.urgent_work import UrgentWork\n"
        "work = UrgentWork(Path(sys.argv[1]), 2)\n"
        "with work.during(2):\n"
        "    print('at work', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at work\n"
        assert not work.leaves_cores()
        assert work.leaves_process()
        process.kill()
    assert work.leaves_cores()
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_a_later_process_with_the_same_number_is_another_one(tmp_path: Path) -> None:
    (tmp_path / f"{os.getpid()}-17-0").write_bytes((2).to_bytes(8, "little"))
    assert UrgentWork(tmp_path, 2).leaves_cores()
    assert [path.name.split("-")[1] == "17" for path in tmp_path.iterdir()] == [False]


def test_bulk_work_waits_but_never_for_ever() -> None:
    now_s = 0.0
    work = UrgentWork(None, 2)
    gate = BulkGate(work.leaves_cores, lambda: now_s)
    assert gate()
    with work.during(1):
        assert not gate()
        now_s = 0.9 * PATIENCE_S
        assert not gate()
        now_s = 1.1 * PATIENCE_S
        assert gate()
        assert not gate(), "one unit, and then it waits again"
    assert gate()
    with work.during(1):
        assert not gate(), "a new wait begins anew"
