"""Shares out the units of a computation that goes phase by phase among threads, inside numba.

Units are numbered through all phases and computations. A phase opens when all units before it are
done; a thread claims the next unit of it, so late threads delay others only within a unit.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from decoder_worker.cpu.step_team import CLAIMED, DONE, WAITED

# Checks of a phase that does not end, some 25 ns each.
YIELD_AFTER = 2_000  # the leader gives its core to a helper within a unit
SLOW_AFTER = 8_000  # and notes that it has to wait for helpers
LEAVE_AFTER = 20_000  # helpers leave

_intrinsic: Any = intrinsic
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
# An LLVM intrinsic, with its arguments, that pauses for some 25 ns. (Arm's own hint to yield does
# nothing on most cores; a barrier takes about that long.)
_X86, _ARM = ("llvm.x86.sse2.pause", ()), ("llvm.aarch64.isb", (15,))
_PAUSES = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
_PAUSE = _PAUSES.get(platform.machine().lower())


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@_intrinsic  # type: ignore[untyped-decorator]
def _load(_context: Any, counters: Any, index: Any) -> Any:
    """Read counters[index] with acquire ordering."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *args)
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(counters, types.intp), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _add(_context: Any, counters: Any, index: Any, number: Any) -> Any:
    """Add to counters[index] with acquire-release ordering; returns the value before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "acq_rel")

    return types.int64(counters, types.intp, types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _replace(_context: Any, counters: Any, index: Any, expected: Any, new: Any) -> Any:
    """Set counters[index] to `new` if it is `expected`; returns whether it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        found = builder.cmpxchg(pointer, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return types.boolean(counters, types.intp, types.int64, types.int64), generate


@_intrinsic  # type: ignore[untyped-decorator]
def _pause(_context: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        if _PAUSE is not None:
            name, numbers = _PAUSE
            args = [ir.Constant(ir.IntType(32), number) for number in numbers]
            pause_type = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
            builder.call(builder.module.declare_intrinsic(name, (), pause_type), args)
        return context.get_dummy_value()

    return types.none(), generate


@njit(nogil=True, cache=True)
def claim(counters: Any, end: Any) -> Any:
    """Claim the next unit of the open phase, which ends at `end`; -1 if all are claimed."""
    while True:
        unit = _load(counters, CLAIMED)
        if unit >= end:
            return -1
        if _replace(counters, CLAIMED, unit, unit + 1):
            return unit


@njit(nogil=True, cache=True)
def finish(counters: Any) -> Any:
    """Note that a claimed unit is done; returns how many are."""
    return _add(counters, DONE, 1) + 1


@njit(nogil=True, cache=True)
def wait(counters: Any, end: Any, leads: Any) -> Any:
    """Wait until all units below `end` are done. False for a helper that is to leave."""
    looks = 0
    while _load(counters, DONE) < end:
        looks += 1
        if leads and looks > YIELD_AFTER:
            _sched_yield()
        elif looks > LEAVE_AFTER:
            return False
        _pause()
    if leads and looks > SLOW_AFTER:
        counters[WAITED] += 1
    return True


@njit(nogil=True, cache=True)
def conclude(counters: Any) -> None:
    """Count a phase's concluding work as one unit more, which opens the next phase."""
    claim(counters, np.iinfo(np.int64).max)
    finish(counters)


@njit(nogil=True, cache=True)
def is_past(counters: Any, end: Any) -> Any:
    return _load(counters, DONE) >= end


@njit(nogil=True, cache=True)
def skip_to(counters: Any, end: Any) -> None:
    """Mark all units below `end` as done. For the leader, when nobody is within a unit."""
    _add(counters, CLAIMED, end - _load(counters, CLAIMED))
    _add(counters, DONE, end - _load(counters, DONE))
