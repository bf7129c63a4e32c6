"""Runs Ray's launcher, `ray up` and `ray down`, and says what to do where it fails.

The launcher's lines are shown as they come. `ray down` leaves Ray running on machines of one's own,
so this module also runs `ray stop` on each of them. Every failure is a ConfigurationError that says
what to do about it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from cluster.cli.operate.cluster_file import ClusterFile
from cluster.cli.operate.dashboard import ray_command
from cluster.common.errors import ConfigurationError
from cluster.serve.start.readiness import Say

DOWN_S = 900.0  # clouds take minutes to end machines
LAST_LINES_S = 1.0  # to read the last lines: ssh may outlive the launcher and keep its output open
RAY_STOP_S = 60.0  # of one machine
SSH_AT_ONCE = 16

# What to do when `ray up` fails, by the step in which it did, as its output names the steps.
REMEDIES = {
    "SSH": "try it by hand: {ssh}",
    "file mounts": "rsync must be installed on both machines",
    "initialization commands": "its output is above; on the machine: {ssh}",
    "setup commands": "its output is above; the machine needs Python with venv, and must reach "
    "pip's index or a mirror of it (PIP_INDEX_URL); on the machine: {ssh}",
    "Ray runtime": "its output is above; look into /tmp/ray/session_latest/logs there ({ssh}), "
    "and whether something else has its port 6379 or 8265",
}


def run_ray_up(file: ClusterFile, show: Say) -> None:
    """Run `ray up`, and hand its lines to `show`.

    Raises:
        ConfigurationError: it failed; the message names the step and what to do about it.
    """
    step = "Checking the environment"

    def follow(line: str) -> None:
        nonlocal step
        if found := re.match(r"\s*\[\d+(?:-\d+)?/\d+\] (.+)", line):
            step = found[1].strip()
        show(line)

    if _launcher("up", file, follow) != 0:
        raise ConfigurationError(f"`ray up` failed at: {step}. {_remedy(step, file)}{_risk(step)}")


def _remedy(step: str, file: ClusterFile) -> str:
    address = file.head_address or "HEAD"
    for word, remedy in REMEDIES.items():
        if word.lower() in step.lower():
            return "What to do: " + remedy.format(ssh=shlex.join(file.ssh(address)))
    return "Its last lines say why; more of them come by: ray up -vvv " + shlex.quote(
        str(file.path)
    )


def _risk(step: str) -> str:
    """What else a failure in this step may break.

    The head has a copy of the file before it runs the file's commands, and its autoscaler reads
    that copy again.
    """
    if any(word in step.lower() for word in ("initialization", "setup", "ray runtime")):
        return (
            ". If the cluster was up: its head has this file already and is setting up the other "
            "nodes by it, which ends Ray there when that fails too. Correct it and run this again"
        )
    return ""


def run_ray_down(file: ClusterFile, say: Say, show: Say) -> None:
    """Run `ray down`, and hand its lines to `show`; on machines of one's own also stop Ray on each.

    On these `ray down` stops the head alone, and not even the head after a `ray up` that failed.

    Raises:
        ConfigurationError: it failed or took too long, or a machine could not be reached.
    """
    problems = []
    try:
        if _launcher("down", file, show, DOWN_S) != 0:
            problems.append("`ray down` failed; its last lines say why")
    except subprocess.TimeoutExpired:
        problems.append(f"`ray down` was ended because it still ran after {DOWN_S:.0f} s")
    if file.is_onprem:
        if left := _stop_machines(file, say):
            problems.append(
                f"Ray may still run on {', '.join(left)}, where ssh or `ray stop` failed; "
                f"there: ray stop --force"
            )
    elif problems:
        problems.append("look in the cloud's console for machines that still run and cost money")
    if problems:
        raise ConfigurationError(
            f"{'. '.join(problems)}. Then try again: splitscribe down {file.path}"
        )


def _stop_machines(file: ClusterFile, say: Say) -> list[str]:
    """Stop Ray on the head first, so that the head starts nothing on the others, then on these.

    Returns:
        The addresses where that failed.
    """
    heads = [file.head_address] if file.head_address else []
    failed: list[str] = []

    def stop(address: str) -> None:
        started = time.monotonic()
        if _ray_stop(file, address):
            say(f"{address}: Ray stopped, in {time.monotonic() - started:.1f} s")
        else:
            failed.append(address)

    for machines in (heads, file.worker_addresses):
        with ThreadPoolExecutor(SSH_AT_ONCE) as pool:
            list(pool.map(stop, machines))
    return sorted(failed)


def _ray_stop(file: ClusterFile, address: str) -> bool:
    script = "bash --login -c -i '. ~/.bashrc; ray stop --force' > /dev/null 2>&1 < /dev/null"
    try:
        run = subprocess.run(
            [*file.ssh(address), script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=RAY_STOP_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def _launcher(name: str, file: ClusterFile, show: Say, limit_s: float | None = None) -> int:
    """Run `ray NAME`, and hand its lines to `show` as they come. Returns its exit status.

    Raises:
        subprocess.TimeoutExpired: it still ran after `limit_s` and was ended.
    """
    flags = ("--yes", "--log-style=pretty", "--log-color=false")
    process = subprocess.Popen(
        ray_command(name, *flags, str(file.path)),
        env=file.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    failed: list[BaseException] = []
    reader = threading.Thread(target=_show_lines, args=(process.stdout, show, failed), daemon=True)
    reader.start()
    try:
        status = process.wait(limit_s)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join(LAST_LINES_S)
    if failed:
        raise failed[0]
    return status


def _show_lines(lines: Iterable[str], show: Say, failed: list[BaseException]) -> None:
    """Read to the end, also where lines can no longer be shown: the launcher waits for a reader."""
    for line in lines:
        try:
            if not failed:
                show(line.rstrip())
        except BaseException as error:  # a closed terminal is rich's SystemExit
            failed.append(error)
