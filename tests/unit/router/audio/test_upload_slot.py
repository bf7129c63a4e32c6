"""The page by which an audio worker tells what it is on, read while it is written."""

from __future__ import annotations

import subprocess
import sys
import time

from router.audio.protocol import UploadSlot

WRITER = """
import sys, time
from router.audio.protocol import UploadSlot
slot, end = UploadSlot(int(sys.argv[1])), time.monotonic() + 1.0
print("began", flush=True)
while time.monotonic() < end:
    for _ in range(1000):
        slot.set(7)
        slot.clear()
"""


def test_a_slot_tells_its_upload_and_for_how_long() -> None:
    slot = UploadSlot(UploadSlot.make_file())
    assert slot.get() == (0, 0.0)
    slot.set(3)
    upload_id, busy_s = slot.get()
    assert upload_id == 3
    assert 0 <= busy_s < 60
    slot.clear()
    assert slot.get() == (0, 0.0)
    slot.close()
    slot.close()


def test_no_step_looks_long_to_another_process_that_reads_while_it_is_written() -> None:
    """Half-written, a step seemed to last since the machine's start, and its worker was killed."""
    fd = UploadSlot.make_file()
    slot = UploadSlot(fd)
    command = [sys.executable, "-c", WRITER, str(fd)]
    with subprocess.Popen(command, pass_fds=(fd,), stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        seen, longest_s = set(), 0.0
        end = time.monotonic() + 0.9
        while time.monotonic() < end:
            upload_id, busy_s = slot.get()
            seen.add(upload_id)
            longest_s = max(longest_s, busy_s)
    slot.close()
    assert seen == {0, 7}
    assert longest_s < 60
