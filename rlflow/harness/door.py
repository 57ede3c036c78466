"""`Door`: the HTTP server of a rank, on the loopback, through which the agents of its episodes call the policy.

The server knows keys and requests, and nothing of models. A request goes to the rank's `ConversationLoop`, which
answers it, and waits here. An agent's key is random, of one episode, and refused from the episode's end on.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlflow.errors import line_log, require, shown
from rlflow.harness.apis import API, APIS, Chat, RequestError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = line_log(__name__)

START_SECONDS = 30.0  # that the server may take to begin
KEPT_SECONDS = 3600  # that a connection may wait for its next request
KEPT_KEYS = 1024  # of episodes that ended, whose late calls the log names
MODELS = "/v1/models"


@dataclass(frozen=True)
class HttpAnswer:
    """The answer to a request.

    Attributes:
        status: HTTP status.
        body: JSON of it; of a stream the data of its events.
    """

    status: int
    body: dict[str, Any] | list[str]


@dataclass(eq=False)
class OpenEpisode:
    """An episode whose agent may call.

    Attributes:
        number: Number of the episode in the loop.
        name: Names it and its row in the log.
        models: The names that its agent may call.
        arrive: Callback for each request, JSON-able, in the server's thread.
        delivered: Ids of the requests that were answered while somebody waited for it.
    """

    number: int
    name: str
    models: Sequence[str]
    arrive: Callable[[dict[str, Any]], None]
    delivered: list[int] = field(default_factory=list)


class Door:
    """A server on a free port of the loopback; it starts when it is made.

    Raises:
        UserError: The libraries of the server are not installed.
    """

    def __init__(self) -> None:
        check_installed()
        import uvicorn

        _reached_without_a_proxy()
        self._lock = threading.RLock()
        self._episodes: dict[str, OpenEpisode] = {}
        self._ended: dict[str, str] = {}  # names of the last episodes that ended, by their keys; empty once logged
        self._waiting: dict[int, tuple[OpenEpisode, API, asyncio.Future[HttpAnswer]]] = {}  # without an answer, by id
        self._requests = 0
        self._refused = 0
        self._warned = False  # of a key that was never given
        self._warned_of_path = False
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(
            self._app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEPT_SECONDS,  # an agent's tools may take long, and its client keeps the connection
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name="door", daemon=True
        )
        self._thread.start()
        until = time.monotonic() + START_SECONDS
        while not self._server.started:
            assert self._thread.is_alive(), "the door does not open"
            assert time.monotonic() < until, "the door does not open in time"
            time.sleep(0.005)

    def open(self, episode: OpenEpisode) -> str:
        """Begin an episode; returns its key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        with self._lock:
            self._episodes[key] = episode
        return key

    def end(self, key: str) -> list[int]:
        """End an episode and refuse its further requests; returns the ids of requests that were answered."""
        with self._lock:
            episode = self._episodes.pop(key)
            self._ended[key] = episode.name
            if len(self._ended) > KEPT_KEYS:
                self._ended.pop(next(iter(self._ended)))
            delivered = list(episode.delivered)
            left = [(request, api) for request, (of, api, _) in self._waiting.items() if of is episode]
        ended = RequestError("the episode has ended", status=410, code="episode_ended")
        for request, api in left:
            self.answer(request, HttpAnswer(ended.status, api.problem(ended)))
        return delivered

    def refused(self) -> int:
        """The number of requests with no key of an episode in progress, since the last call."""
        with self._lock:
            refused, self._refused = self._refused, 0
        return refused

    def answer(self, request: int, sent: HttpAnswer) -> None:
        """Answer a request; an answer that was given before, because its episode has ended, stays as it is."""
        with self._lock:
            _, _, future = self._waiting.pop(request, (None, None, None))
        if future is None:
            return

        def set_it(waiting: asyncio.Future[HttpAnswer] = future) -> None:
            if not waiting.done():
                waiting.set_result(sent)

        future.get_loop().call_soon_threadsafe(set_it)

    def close(self) -> None:
        """Stop the server."""
        for key in list(self._episodes):
            self.end(key)
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(START_SECONDS)

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [Route(MODELS, self._models), *(Route(path, self._call, methods=["POST"]) for path in APIS)]
        return Starlette(routes=[*routes, Route("/{path:path}", self._unknown, methods=["GET", "POST", "DELETE"])])

    async def _models(self, request: Request) -> Response:
        episode = self._of_key(request)
        if episode is None:
            return self._no_key(request, Chat())
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "rlflow"} for name in episode.models]
        return _json(200, {"object": "list", "data": models})

    async def _unknown(self, request: Request) -> Response:
        text = f"there is no {request.method} {request.url.path}; there are {', '.join((MODELS, *APIS))}"
        with self._lock:
            self._refused += 1
            first, self._warned_of_path = not self._warned_of_path, True
        if first:
            log.warning("an agent asked what is not served: %s; more are only counted", shown(text))
        return _refused(Chat(), RequestError(text, status=404, code="not_found"))

    async def _call(self, request: Request) -> Response:
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        api = APIS[request.url.path]
        if self._of_key(request) is None:  # whose body is not read
            return self._no_key(request, api)
        try:
            sent_body = await request.body()
        except ClientDisconnect:
            return Response()  # which nobody reads
        try:
            body = json.loads(sent_body)
        except (ValueError, RecursionError):  # a text, which the episode refuses as no object
            body = sent_body.decode(errors="replace")
        future: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()
        with self._lock:
            episode = self._of_key(request)
            if episode is None:
                return self._no_key(request, api)
            self._requests += 1
            number = self._requests
            self._waiting[number] = episode, api, future
        again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        episode.arrive(
            {
                "episode": episode.number,
                "request": number,
                "path": api.path,
                "body": body,
                "again": again,
                "once": request.headers.get("idempotency-key"),
            }
        )
        sent = await future
        if isinstance(sent.body, list):
            stream = "".join(f"data: {each}\n\n" for each in sent.body)
            answer = Response(stream, sent.status, media_type="text/event-stream")
        else:
            answer = _json(sent.status, sent.body)
        if not await request.is_disconnected():
            with self._lock:
                episode.delivered.append(number)
        return answer

    def _of_key(self, request: Request) -> OpenEpisode | None:
        return self._episodes.get(_key(request))

    def _no_key(self, request: Request, api: API) -> Response:
        """Refuse a request with no key of an episode in progress; the first of each ended episode is logged."""
        with self._lock:
            self._refused += 1
            key = _key(request)
            name = self._ended.get(key)
            if name:
                self._ended[key] = ""  # it was logged
        if name:
            log.warning("a request came after the end of its episode, and is refused (%s); more are only counted", name)
        elif name is None and not self._warned:
            self._warned = True
            log.warning("a request has a key of no episode, and is refused; more are only counted")
        return _refused(api, RequestError("this key is of no episode in progress", status=401, code="invalid_api_key"))


def ignored(request: int, sent: HttpAnswer) -> None:
    """An `answer` that does nothing, on a rank that shares the engine of another rank with a server."""


def _reached_without_a_proxy() -> None:
    """Let programs that this process starts reach the loopback directly, where the environment names a proxy."""
    names = "NO_PROXY", "no_proxy"  # programs read one or the other
    others = [host for name in names for host in os.environ.get(name, "").split(",") if host.strip()]
    if "*" not in others:  # which counts only where it is alone
        os.environ.update(dict.fromkeys(names, ",".join(dict.fromkeys([*others, "127.0.0.1", "localhost"]))))


def check_installed() -> None:
    """Refuse to begin without the server's libraries, which vLLM brings.

    Raises:
        UserError: They are not installed.
    """
    for module in ("starlette", "uvicorn"):
        require(module, "a harness, whose agent calls a server,", "vllm", "harness")


def _key(request: Request) -> str:
    return request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")


def _refused(api: API, refused: RequestError) -> Response:
    return _json(refused.status, api.problem(refused))


def _json(status: int, body: dict[str, Any]) -> Response:
    from starlette.responses import JSONResponse

    # No answer of this server is another one the next time: clients need not ask again.
    return JSONResponse(body, status, headers={"x-should-retry": "false"} if status >= 400 else None)
