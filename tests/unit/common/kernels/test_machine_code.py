"""Kernels that are compiled at a start, and what they are made of."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from cluster.common.kernels.cpu import machine_code
from cluster.common.kernels.cpu.machine_code import as_array, built
from tests.support.workers.decoder_engines import wait_until


def test_a_failed_build_leaves_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> int:
        raise RuntimeError("no machine code today\nand more lines")

    with caplog.at_level(logging.WARNING):
        assert built("broken", "", build) is None
    assert "no broken kernels, torch's operations stay: no machine code today" in caplog.text
    assert "more lines" not in caplog.text


def test_a_build_that_takes_long_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it takes that long; it is waited for."""
    monkeypatch.setattr(machine_code, "TELL_S", 0.01)

    def build() -> bool:
        wait_until(lambda: "compiling late kernels" in caplog.text, "it tells nothing")
        return True

    with caplog.at_level(logging.INFO):
        assert built("late", "", build)
    assert "late kernels are ready after" in caplog.text


def test_numbers_and_functions_are_torch_s() -> None:
    from numba import njit

    from cluster.common.kernels.cpu.arithmetic import bfloat16_bits, erf, exp2, number

    @njit
    def through(x, wholes, bits, back, power, errors, whole_back):
        for i in range(len(x)):
            bits[i] = bfloat16_bits(x[i])
            back[i] = number(bits[i])
            power[i] = exp2(-abs(x[i]))
            errors[i] = erf(x[i] * np.float32(0.0625))
            whole_back[i] = number(wholes[i])

    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 40
    x[:4] = torch.tensor([0.0, -1.0, 2.0, -126.0])
    wholes = x.clamp(-128, 127).to(torch.int8)
    bits = torch.zeros(1000, dtype=torch.bfloat16)
    back, power, errors, whole_back = (np.zeros(1000, np.float32) for _ in range(4))
    through(x.numpy(), wholes.numpy(), as_array(bits), back, power, errors, whole_back)
    assert torch.equal(bits, x.bfloat16())
    assert np.array_equal(back, x.bfloat16().float().numpy())
    expected = np.exp2(-np.abs(x.numpy().astype(np.float64)))
    assert np.allclose(power, expected, rtol=2e-7, atol=3e-38)
    assert np.abs(errors - torch.erf(x.double() / 16).numpy()).max() < 6e-7
    assert np.array_equal(whole_back, wholes.float().numpy())
