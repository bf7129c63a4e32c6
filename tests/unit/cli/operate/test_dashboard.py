"""What is no dashboard, or none that can be reached, is told in one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.cli.operate.dashboard import reach
from cluster.cli.operate.steps import api_url
from cluster.common.errors import ConfigurationError
from tests.support.http_host import Answer, http_host


@pytest.mark.parametrize(
    "answer",
    [
        Answer(301, headers={"location": "https://ray.example/"}),
        Answer(200, b"<!doctype html><title>Welcome</title>"),
        Answer(500, b"Traceback: no space left"),
    ],
)
def test_an_answer_that_is_not_the_dashboard_s_is_told(answer: Answer) -> None:
    with http_host(lambda *_: answer) as host, reach(None, host.url) as dashboard:
        for ask in (dashboard.nodes, dashboard.serve):
            with pytest.raises(ConfigurationError, match=f"{host.name} answered {answer.status}"):
                ask()


@pytest.mark.parametrize("address", ["http://head:port", "http://[::1", "head:8265"])
def test_an_address_that_is_no_url_is_told(address: str) -> None:
    with (
        pytest.raises(ConfigurationError, match=r"head|::1"),
        reach(None, address) as dashboard,
    ):
        dashboard.serve()


def test_the_api_of_a_head_with_an_address_of_either_kind_has_a_url() -> None:
    heads = ("http://10.0.0.1:8265", "http://[fd00::1]:8265", "https://ray.example/dashboard")
    dashboards: list[Any] = [SimpleNamespace(url=url) for url in heads]
    urls = [api_url(one, None, 8000) for one in dashboards]
    assert urls == ["http://10.0.0.1:8000", "http://[fd00::1]:8000", "http://ray.example:8000"]
