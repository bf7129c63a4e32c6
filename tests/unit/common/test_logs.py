"""Each log line says which request, role and replica it belongs to."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from cluster.common.errors import KVLostError
from cluster.common.logs import (
    LogEncoding,
    configure_logging,
    current_request_id,
    log_fields,
    request_scope,
)
from cluster.serve.distribution import CODE_PACKAGES

SECRET = "-".join(("not", "for", "logs"))  # a traceback's lines of code would hold it whole


@pytest.fixture(autouse=True)
def _restored_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in CODE_PACKAGES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def configured(encoding: LogEncoding = "plain", *, quotes: bool = True) -> io.StringIO:
    stream = io.StringIO()
    names = {"role": "router", "replica": "router-1"}
    configure_logging(
        "INFO", CODE_PACKAGES, **names, encoding=encoding, quotes=quotes, stream=stream
    )
    return stream


def test_plain_lines() -> None:
    replaced, stream = configured(), configured()
    with request_scope("req_1"):
        extra = {"windows": 3, "_stamp": 1}  # as Ray stamps every record
        logging.getLogger("router.http.routes").info("done in %d ms", 12, extra=extra)
    logging.getLogger("router.http.routes").debug("not shown")
    logging.getLogger("cluster.serve.app").warning("outside")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("INFO router/router-1 req_1 router.http.routes: done in 12 ms windows=3")
    assert second.endswith("WARNING router/router-1 - cluster.serve.app: outside")
    assert not replaced.getvalue()


def test_json_lines_with_tracebacks() -> None:
    stream = configured("json")
    logger = logging.getLogger("decoder_worker.engine")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logger.exception("a step failed\nbadly", extra={"request_id": "req_9", "step": 4})
    line = json.loads(stream.getvalue())
    assert line["message"] == "a step failed\nbadly"
    assert (line["role"], line["replica"], line["request_id"]) == ("router", "router-1", "req_9")
    assert (line["level"], line["step"]) == ("ERROR", 4)
    assert line["exception"].endswith("RuntimeError: broken")


def test_what_the_message_says_is_said_again_in_json_alone() -> None:
    extra = log_fields("req_3", window=2, attempt=1, peer="encoder-a")

    def written(encoding: LogEncoding) -> str:
        stream = configured(encoding)
        logging.getLogger("decoder_worker").info("window %d of %s", 2, "encoder-a", extra=extra)
        return stream.getvalue().strip()

    assert written("plain").endswith("req_3 decoder_worker: window 2 of encoder-a")
    fields = json.loads(written("json"))
    assert (fields["window"], fields["attempt"], fields["peer"]) == (2, 1, "encoder-a")
    assert "log_fields" not in fields


@pytest.mark.parametrize("encoding", ["plain", "json"])
def test_a_bug_is_logged_without_what_it_quotes(encoding: LogEncoding) -> None:
    """Nor by other handlers; its classes, places and our own words stay."""
    stream, other = configured(encoding, quotes=False), io.StringIO()
    serves_file = logging.StreamHandler(other)
    logging.getLogger("router").addHandler(serves_file)
    try:
        try:
            try:
                int(SECRET)
            except ValueError as error:
                raise KVLostError("the page is gone") from error
        except KVLostError as error:
            raise ExceptionGroup(SECRET, [error, KeyError(SECRET)]) from None
    except ExceptionGroup:
        logging.getLogger("router").exception("a request failed")
    for written in (stream.getvalue(), other.getvalue()):
        assert SECRET not in written
        assert all(name in written for name in ("ValueError", "KVLostError: the page is gone"))
        assert "test_a_bug_is_logged" in written


async def test_tasks_inherit_the_request_and_neighbours_do_not() -> None:
    async def see() -> str:
        await asyncio.sleep(0)
        return current_request_id()

    async def serve(request_id: str) -> str:
        with request_scope(request_id):
            return await asyncio.create_task(see())

    assert await asyncio.gather(serve("a"), serve("b"), see()) == ["a", "b", "-"]
    assert current_request_id() == "-"
