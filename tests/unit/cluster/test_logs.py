"""Each log line says which request, role and replica it belongs to."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from cluster.logs import PACKAGES, configure_logging, current_request_id, request_scope


@pytest.fixture(autouse=True)
def _restored_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def test_plain_lines() -> None:
    stream = io.StringIO()
    configure_logging("INFO", role="router", replica="router-1", stream=stream)
    with request_scope("req_1"):
        logging.getLogger("router.routes").info("done in %d ms", 12, extra={"windows": 3})
    logging.getLogger("router.routes").debug("not shown")
    logging.getLogger("cluster.app").warning("outside")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("INFO router/router-1 req_1 router.routes: done in 12 ms windows=3")
    assert second.endswith("WARNING router/router-1 - cluster.app: outside")


def test_json_lines_with_tracebacks() -> None:
    stream = io.StringIO()
    configure_logging("INFO", role="decoder", replica="d", encoding="json", stream=stream)
    logger = logging.getLogger("decoder_worker.engine")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logger.exception("a step failed\nbadly", extra={"request_id": "req_9", "step": 4})
    line = json.loads(stream.getvalue())
    assert line["message"] == "a step failed\nbadly"
    assert (line["role"], line["replica"], line["request_id"]) == ("decoder", "d", "req_9")
    assert (line["level"], line["step"]) == ("ERROR", 4)
    assert line["exception"].endswith("RuntimeError: broken")


def test_configuring_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("INFO", role="a", replica="1", stream=first)
    configure_logging("INFO", role="b", replica="2", stream=second)
    logging.getLogger("encoder_worker").info("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


async def test_tasks_inherit_the_request_and_neighbours_do_not() -> None:
    async def see() -> str:
        await asyncio.sleep(0)
        return current_request_id()

    async def serve(request_id: str) -> str:
        with request_scope(request_id):
            return await asyncio.create_task(see())

    assert await asyncio.gather(serve("a"), serve("b"), see()) == ["a", "b", "-"]
    assert current_request_id() == "-"
