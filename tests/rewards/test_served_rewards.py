"""Rewards that a server gives, by a real one."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlflow.errors import UserError
from rlflow.rewards import HTTPReward, Judge, RewardInput
from rlflow.rewards.judge import grades_in


class Server:
    """Answers as `answer` says: a status and a body. Counts requests, and how many there were at once."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], tuple[int, Any]] = lambda body: (200, {})
        self.requests: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        lock, here = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    here.requests.append(body)
                    here.headers = dict(self.headers)
                    status, said = here.answer(body)
                content = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Retry-After", "0.01")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        looks_every = 0.01  # seconds, whether it shall end
        threading.Thread(target=self._server.serve_forever, args=(looks_every,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def lengths(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"scores": [len(text) for text in body["texts"]]}


def test_a_server_scores_in_batches(server: Server) -> None:
    server.answer = lengths
    rows = [{"answer": "4", "notes": "long"}] * 5
    scores = HTTPReward(server.url, batch=2, columns=["answer"]).score(
        RewardInput(["a", "ab", "", "abcd", "abc"], rows)
    )
    assert scores.total == [1, 2, 0, 4, 3]
    assert sorted(len(request["texts"]) for request in server.requests) == [1, 2, 2]
    assert server.requests[0]["rows"][0] == {"answer": "4"}


def test_parts_that_a_server_returns_are_parts_of_the_reward(server: Server) -> None:
    server.answer = lambda body: (200, {"scores": [{"right": 1.0, "brief": 0.5}] * len(body["texts"])})
    scores = HTTPReward(server.url).score(RewardInput(["a", "b"], [{}] * 2))
    assert scores.total == [1.5, 1.5]
    assert scores.parts == {"brief": [0.5, 0.5], "right": [1.0, 1.0]}


def test_a_server_that_is_busy_is_asked_again(server: Server) -> None:
    busy = iter([503, 429])
    server.answer = lambda body: (status, {}) if (status := next(busy, 200)) != 200 else lengths(body)
    assert HTTPReward(server.url).score(RewardInput(["ab"], [{}])).total == [2]
    assert len(server.requests) == 3


def test_a_server_that_fails_ends_the_run_in_one_line_or_scores_0(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.answer = lambda body: (400, {})
    with pytest.raises(
        UserError,
        match=r"got no answer \(HTTPStatusError: .*400.*\) \(response .*; correct it, or set `on_error` to"
        r" zero or drop",
    ) as refused:
        HTTPReward(server.url).score(RewardInput(["ab"], [{}]))
    assert "\n" not in str(refused.value)
    assert len(server.requests) == 1, "what is wrong for good is not asked again"
    server.answer = lambda body: (400, {}) if "x" in body["texts"] else lengths(body)
    scores = HTTPReward(server.url, batch=1, on_error="zero").score(RewardInput(["ab", "x"], [{}] * 2))
    assert (scores.total, scores.failed) == ([2, 0], {1: "zero"})
    masking = HTTPReward(server.url, batch=2, on_error="drop")
    assert masking.drops
    with caplog.at_level(logging.WARNING):
        assert masking.score(RewardInput(["ab", "a", "x", "b", "c"], [{}] * 5)).failed == {2: "drop", 3: "drop"}
    assert (
        f"2 of 5 samples were dropped; reward of {server.url} failed on sample 2 with ConnectionError: got "
        in caplog.text
    )


@pytest.mark.parametrize("score", [None, "1", {"right": None}, 1e300, {}])
def test_what_is_not_a_number_is_a_failure_of_the_server(server: Server, score: Any) -> None:
    server.answer = lambda body: (200, {"scores": [score] * len(body["texts"])})
    with pytest.raises(
        UserError,
        match=r"sample 0 with \w+: .*it returned (None|'1'|inf|1e\+300), (not a number|which)|it returned a mappi",
    ):
        HTTPReward(server.url).score(RewardInput(["a"], [{}]))
    assert HTTPReward(server.url, on_error="zero").score(RewardInput(["a"], [{}])).failed == {0: "zero"}


@pytest.mark.parametrize("wrong", [None, b"1e300", b"1" + b"0" * 400, b"NaN"])
def test_an_answer_that_is_not_a_score_fails_its_sample_alone(server: Server, wrong: Any) -> None:
    said = wrong if isinstance(wrong, bytes) else json.dumps(wrong).encode()
    server.answer = lambda body: (200, b'{"scores": [{"a": 1}, %s, {"a": 2}]}' % said)
    scores = HTTPReward(server.url, on_error="drop").score(RewardInput(["a", "b", "c"], [{}] * 3))
    assert (scores.total, scores.failed) == ([1, 0, 2], {1: "drop"})


def test_a_server_that_sends_a_letter_now_and_then_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.05)

        threading.Thread(target=answer, daemon=True).start()
        began = time.monotonic()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(UserError, match=r"got no answer \(ReadTimeout: the answer took longer than 1 s\)"):
            HTTPReward(url, timeout_s=1.0, retries=0).score(RewardInput(["a"], [{}]))
        assert time.monotonic() - began < 10


def test_a_row_is_sent_with_the_columns_that_it_has(server: Server) -> None:
    with pytest.raises(UserError, match="column `answers`"):
        HTTPReward(server.url, columns=["answers"]).score(RewardInput(["a"], [{"answer": 1}]))
    with pytest.raises(UserError, match=r"got no answer \(TypeError"):
        HTTPReward(server.url).score(RewardInput(["a"], [{"answer": {1, 2}}]))


@pytest.mark.parametrize("said", [{"scores": [1.0]}, {"score": 1.0}, [1.0, 2.0], b"no JSON", b"[" * 200_000])
def test_an_answer_of_another_form_is_shown(server: Server, said: Any) -> None:
    server.answer = lambda body: (200, said)
    with pytest.raises(UserError, match=r"was answered .* for 2 texts|got no answer \((JSONDecode|Value)Error"):
        HTTPReward(server.url).score(RewardInput(["a", "b"], [{}] * 2))


def test_no_server_is_an_error_after_the_last_try() -> None:
    with pytest.raises(
        UserError,
        match=r"reward of http://127.0.0.1:9 failed on sample 0 with ConnectionError: got no answer \(ConnectError",
    ):
        HTTPReward("http://127.0.0.1:9", retries=0).score(RewardInput(["a"], [{}]))


def test_secrets_come_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = lengths
    monkeypatch.setenv("JUDGE_KEY", "word")
    HTTPReward(server.url, headers={"Authorization": "Bearer $JUDGE_KEY"}).score(RewardInput(["a"], [{}]))
    assert server.headers["Authorization"] == "Bearer word"
    with pytest.raises(UserError, match=r"name \$NO_KEY, and there is no such environment variable"):
        HTTPReward(server.url, headers={"Authorization": "$NO_KEY"})


def chat(text: str) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_a_judge_gives_a_share_of_its_scale(server: Server) -> None:
    server.answer = lambda body: chat('Right, but long. {"score": 7}')
    judge = Judge(f"{server.url}/v1", "grader")
    assert judge.score(RewardInput(["42"], [{"question": "6 * 7?"}])).total == [0.7]
    asked = server.requests[0]
    assert (asked["model"], asked["temperature"]) == ("grader", 0.0)
    assert "6 * 7?" in asked["messages"][0]["content"]
    assert "42" in asked["messages"][0]["content"]


def test_a_rubric_has_a_part_for_each_criterion_and_weighs_them(server: Server) -> None:
    server.answer = lambda body: chat('Hm {"right": 4, "polite": 1}')
    judge = Judge(
        server.url,
        "grader",
        criteria={"right": "the number is right", "polite": "it is polite"},
        weights={"right": 3.0, "polite": 1.0},
        scale=4,
    )
    scores = judge.score(RewardInput(["42"], [{"question": "6 * 7?"}]))
    assert scores.parts == {"right": [1.0], "polite": [0.25]}
    assert scores.total == [(3 * 1.0 + 1 * 0.25) / 4]
    assert "- right: the number is right\n- polite: it is polite\n" in server.requests[0]["messages"][0]["content"]


def test_an_answer_without_grades_is_asked_for_again_and_then_fails(server: Server) -> None:
    said = iter(["I cannot say", '{"score": 11}', '{"score": 10}'])
    server.answer = lambda body: chat(next(said))
    assert Judge(server.url, "grader").score(RewardInput(["a"], [{"question": ""}])).total == [1.0]
    server.answer = lambda body: chat("I cannot say")
    with pytest.raises(UserError, match=r"judge grader failed on sample 0 with ValueError: .* no grades in 2"):
        Judge(server.url, "grader", retries=1).score(RewardInput(["a"], [{"question": ""}]))


def test_a_prompt_of_a_column_that_is_not_there_is_refused(server: Server) -> None:
    with pytest.raises(UserError, match=r"`prompt` names \{question\}.*Did you mean \"questions\"\?"):
        Judge(server.url, "grader").score(RewardInput(["a"], [{"questions": ""}]))
    with pytest.raises(UserError, match="`prompt` does not say where the response goes"):
        Judge(server.url, "grader", prompt="Grade it")


@pytest.mark.parametrize(
    ("answer", "grades"),
    [
        ('{"a": 1} then {"a": 2}', {"a": 2.0}),
        ('{"a": 1} then {"b": 2}', {}),
        ('{"a": {"b": 3}}', {}),
        ('{"a": "3"} thank you', {"a": 3.0}),
        ('{"a": 5, "why": {"b": 1}}', {"a": 5.0}),
        ('{"a": 5, "why": {"a": 1}}', {"a": 5.0}),
        ('{"a": 1} {"b": {"a": 4}}', {"a": 4.0}),
        ('{"a": ' + "9" * 400 + "}", {}),
        ('{"a": ' * 3000 + "1" + "}" * 3000, {}),
        ("none", {}),
    ],
    ids=range(10),
)
def test_of_several_grades_in_an_answer_the_last_count(answer: str, grades: dict[str, float]) -> None:
    assert grades_in(answer, ["a"], 10) == grades
