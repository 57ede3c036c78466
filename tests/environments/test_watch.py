"""A call that does not return is warned of, where nothing ends it."""

from __future__ import annotations

import logging

import pytest

from rlflow.environments import session
from rlflow.environments.environment import defined
from rlflow.environments.host import Host, InProcess
from rlflow.environments.session import Session
from rlflow.worker import Limits, Worker


@pytest.mark.parametrize(
    ("host", "lines"), [(InProcess(), 1), (Worker(Limits(seconds=20)), 0)], ids=["in process", "in a worker"]
)
def test_a_call_that_does_not_return_is_warned_of_once(
    host: Host, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "WARN_AFTER", 0.1)
    with caplog.at_level(logging.WARNING):
        Session(defined("games.Late"), host).begin([{"role": "user", "content": "?"}], {"late": 0.5})
    host.close()
    assert len(caplog.records) == lines
    if lines:
        assert "(`games.Late`, `begin`; the row is {'late': 0.5})" in caplog.text
        assert "set `environment.seconds`" in caplog.text
