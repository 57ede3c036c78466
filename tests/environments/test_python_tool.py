"""The tool that runs a policy's programs. RLFLOW_HAS_NAMESPACES=1 says that the system must be able to."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import pytest

from rlflow.environments import PythonTool
from rlflow.environments.bridge import ParsedTurn
from rlflow.environments.environment import defined
from rlflow.environments.host import InProcess
from rlflow.environments.session import Session
from rlflow.environments.tool_calls import ToolCall
from rlflow.errors import UserError
from rlflow.worker import Limits, Worker, sandbox
from rlflow.worker.sandbox import why_not

if os.environ.get("RLFLOW_HAS_NAMESPACES") == "1":
    assert not why_not(), why_not()
isolated = pytest.mark.skipif(bool(why_not()), reason=f"programs cannot be isolated here: {why_not()}")


@pytest.fixture(scope="module")
def tool() -> PythonTool:
    return PythonTool(timeout_s=10, output_kb=1)


@isolated
def test_a_program_is_answered_by_what_it_prints(tool: PythonTool) -> None:
    assert tool.python("print(6 * 7)") == "42\n"
    assert tool.python("x = 1") == "the program printed nothing"
    assert tool.python("print('a')\n1 / 0") == "a\nZeroDivisionError: division by zero"
    assert tool.python("def f(:") == "SyntaxError: invalid syntax"
    assert tool.python("import os; os._exit(3)") == "the program ended with code 3"
    assert tool.python("print('b' * 5000)") == "b" * 1024


@isolated
def test_a_program_that_does_not_end_is_ended() -> None:
    said = PythonTool(timeout_s=10).python("print('begun')\nwhile True: pass")
    assert said == "begun\nthe program took longer than 10 s and was ended"


ESCAPES = {
    "a file of this machine": "print(open({path!r}).read())",
    "the environment": "import os; print(os.environ['API_KEY'])",
    "a process of others": "import os; os.kill({pid}, 0); print({word!r})",
    "the network": "import socket; socket.create_connection(('127.0.0.1', {port}), 1); print({word!r})",
    "more memory": "bytearray(1 << 30); print({word!r})",
    "more disk": "open('/tmp/x', 'wb').write(bytes(80 << 20)); open('/tmp/y', 'wb').write(bytes(1)); print({word!r})",
    "what another program left": "print({word!r} if 'left' in __import__('os').listdir('/tmp') else 1 / 0)",
    "the files of Python": "open(__import__('sys').prefix + '/x', 'w'); print({word!r})",
    "a namespace of its own": "print({word!r} if __import__('ctypes').CDLL(None).unshare(0x10000000) == 0 else 0)",
}


@isolated
@pytest.mark.parametrize("reached", ESCAPES)
def test_a_program_cannot_read_files_variables_or_sockets_of_the_run(
    reached: str, tool: PythonTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = secrets.token_hex(8)
    (tmp_path / "secret").write_text(word)
    monkeypatch.setenv("API_KEY", word)
    tool.python("open('/tmp/left', 'w').write('here')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        given = {"path": str(tmp_path / "secret"), "word": word, "port": port, "pid": os.getpid()}
        assert word not in tool.python(ESCAPES[reached].format(**given))


@isolated
@pytest.mark.parametrize(
    "apart", [pytest.param(False, marks=pytest.mark.slow), True], ids=["in process", "in a worker"]
)
def test_a_policy_calls_it_as_a_function_and_as_a_method(apart: bool) -> None:
    said = ParsedTurn("", (ToolCall("python", {"code": "print(2 ** 10)"}),))
    for definition in (
        defined(None, ["rlflow.environments.python"]),
        defined("rlflow.environments.PythonTool", (), {"timeout_s": 20}),
    ):
        host = Worker(Limits(timeout_s=60)) if apart else InProcess()
        session = Session(definition, host)
        session.begin([{"role": "user", "content": "?"}], {})
        assert [each["content"] for each in session.answer(said, turn=0).messages] == ["1024\n"]
        host.close()


@pytest.mark.parametrize(
    "named",
    [{"environment": None, "tools": ["rlflow.environments.python"]}, {"environment": "rlflow.environments.PythonTool"}],
    ids=["function", "class"],
)
def test_a_system_that_cannot_isolate_is_refused_before_the_run(
    named: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "why_not", lambda: "unshare: Operation not permitted")
    with pytest.raises(UserError, match=r"^code cannot be isolated here \(unshare: Operation not permitted\)"):
        defined(**named)  # type: ignore[arg-type]
