"""What is asked of UCX, and what its log tells; without NIXL and without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from cluster.common.kv import nixl_wire
from cluster.common.kv.nixl_wire import NixlWire, UcxLog
from cluster.common.kv.pool import PagePool
from cluster.common.kv.wire import TransferConfig

READS = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
# As UCX 1.23 writes it.
TABLE = """\
[1795801023.351167] [vm:25824:0]   +--------+-------------+--------------------+
[1795801023.351167] [vm:25824:0]   | {agent} intra-node cfg#1                  |
[1795801023.351167] [vm:25824:0]   | remote memory read by ucp_get*(multi) into {memory} |
[1795801023.351167] [vm:25824:0]   +--------+-------------+--------------------+
[1795801023.351167] [vm:25824:0]   | Range  | Description |      Config        |
[1795801023.351167] [vm:25824:0]   +--------+-------------+--------------------+
[1795801023.351167] [vm:25824:0]   |  0..80 | short       | rc_verbs/mlx5_0:1  |
[1795801023.351167] [vm:25824:0]   | 81..inf | {how} |
[1795801023.351167] [vm:25824:0]   +--------+-------------+--------------------+
"""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> UcxLog:
    for name in ("UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_PROTO_INFO"):
        monkeypatch.delenv(name, raising=False)
    return UcxLog()


@pytest.mark.parametrize(
    ("how", "lanes"),
    [
        ("zero-copy   | cuda_ipc/cuda", "cuda_ipc"),
        ("software emulation | rc_mlx5/mlx5_0:1", "host+rc_mlx5"),
        ("zero-copy | 50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_1:1/path0", "rc_mlx5"),
    ],
)
def test_ucx_s_log_tells_by_what_each_memory_is_read(log: UcxLog, how: str, lanes: str) -> None:
    tables = ""
    for memory, by in (
        ("host memory from host", "zero-copy | cma/memory"),
        ("cuda from cuda", how),
    ):
        tables += TABLE.format(agent="decoder-0-17", memory=memory, how=by)
    with log.installed():
        Path(os.environ["UCX_LOG_FILE"]).write_text(tables)
    assert log.lanes("decoder-0-17-abcd", "host") == "cma"
    assert log.lanes("decoder-0-17-abcd", "cuda") == lanes
    assert log.lanes("decoder-1-18-abcd", "cuda") is None


def test_each_agent_of_a_process_writes_its_tables(log: UcxLog) -> None:
    """UCX takes the file when it is loaded, and what tables it writes for each agent anew."""
    for _ in range(2):
        with log.installed():
            assert "ucp_get" in os.environ["UCX_PROTO_INFO"]
        assert "UCX_PROTO_INFO" not in os.environ


@pytest.mark.parametrize(("device", "asked"), [("cuda", "on"), ("cpu", None)])
def test_a_gpu_s_pages_are_read_in_place_without_nvlink_too(
    device: str, asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def make_agent(name: str) -> Any:
        found.append(os.environ.get(READS))
        raise RuntimeError("no agent here")

    monkeypatch.setenv(READS, "")  # so that it is as before afterwards
    monkeypatch.delenv(READS)
    monkeypatch.setattr(nixl_wire, "make_agent", make_agent)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    place = torch.device(device, 0)
    pool = SimpleNamespace(device=place, tensor=SimpleNamespace(device=place))
    wire = NixlWire(TransferConfig(b"key", "decoder-0"))
    with pytest.raises(RuntimeError, match="no agent"):
        wire.open(cast(PagePool, pool), np.zeros(1, dtype=np.uint64))
    assert found == [asked]
