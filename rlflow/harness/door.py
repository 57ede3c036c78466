"""`Door`: the HTTP server of a rank, on the loopback, through which the agents of its episodes call the policy.

The server knows keys and requests, and nothing of models. A request goes to the rank's `ConversationLoop`, which
answers it, and waits here. An agent's key is random, of one episode, and refused from the episode's end on.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlflow.errors import require
from rlflow.harness.apis import API, APIS, Chat, Refused

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

START_SECONDS = 30.0  # that the server may take to begin
KEPT_SECONDS = 3600  # that a connection may wait for its next request
MODELS = "/v1/models"


@dataclass(frozen=True)
class Sent:
    """What answers a request.

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
        number: Its number in the loop.
        model: The name by which the policy is called.
        arrive: Called with each request, in the server's thread.
        delivered: Ids of the requests that were answered while somebody waited for it.
    """

    number: int
    model: str
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

        self._lock = threading.Lock()
        self._episodes: dict[str, OpenEpisode] = {}
        self._waiting: dict[int, tuple[OpenEpisode, asyncio.Future[Sent]]] = {}  # requests without an answer, by id
        self._requests = 0
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

    def open(self, number: int, model: str, arrive: Callable[[dict[str, Any]], None]) -> str:
        """Begin an episode; returns its key.

        Args:
            number: Number of the episode in its loop.
            model: The name by which the policy is called.
            arrive: Called with each request, JSON-able, in another thread.
        """
        key = f"sk-{secrets.token_urlsafe(24)}"
        with self._lock:
            self._episodes[key] = OpenEpisode(number, model, arrive)
        return key

    def end(self, key: str) -> list[int]:
        """End an episode, whose requests are refused from now on; returns the ids of those that were answered."""
        with self._lock:
            episode = self._episodes.pop(key)
            delivered = list(episode.delivered)
            left = [request for request, (of, _) in self._waiting.items() if of is episode]
        for request in left:
            self.answer(request, Sent(410, {"error": {"message": "the episode has ended", "code": "episode_ended"}}))
        return delivered

    def answer(self, request: int, sent: Sent) -> None:
        """Answer a request; one that was answered before, because its episode has ended, stays as it is."""
        with self._lock:
            _, future = self._waiting.pop(request, (None, None))
        if future is None:
            return

        def set_it(waiting: asyncio.Future[Sent] = future) -> None:
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
        return Starlette(routes=[*routes, Route("/{path:path}", self._unknown)])

    async def _models(self, request: Request) -> Response:
        episode = self._of_key(request)
        if episode is None:
            return _refused(Chat(), _no_key())
        model = {"id": episode.model, "object": "model", "created": 0, "owned_by": "rlflow"}
        return _json(200, {"object": "list", "data": [model]})

    async def _unknown(self, request: Request) -> Response:
        text = f"there is no {request.method} {request.url.path}; there are {', '.join((MODELS, *APIS))}"
        return _refused(Chat(), Refused(text, status=404, code="not_found"))

    async def _call(self, request: Request) -> Response:
        from starlette.responses import Response

        api = APIS[request.url.path]
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError):
            return _refused(api, Refused("the request is no JSON; send an object", code="invalid_json"))
        future: asyncio.Future[Sent] = asyncio.get_running_loop().create_future()
        with self._lock:
            episode = self._of_key(request)
            if episode is None:
                return _refused(api, _no_key())
            self._requests += 1
            number = self._requests
            self._waiting[number] = episode, future
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
        if not await request.is_disconnected():
            with self._lock:
                episode.delivered.append(number)
        if isinstance(sent.body, list):
            stream = "".join(f"data: {each}\n\n" for each in sent.body)
            return Response(stream, sent.status, media_type="text/event-stream")
        return _json(sent.status, sent.body)

    def _of_key(self, request: Request) -> OpenEpisode | None:
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        return self._episodes.get(given)


def ignored(request: int, sent: Sent) -> None:
    """Answers nobody, on a rank that shares the engine of another one with a door."""


def check_installed() -> None:
    """Refuse to begin without the server's libraries, which vLLM brings.

    Raises:
        UserError: They are not installed.
    """
    for module in ("starlette", "uvicorn"):
        require(module, "a harness, whose agent calls a server,", "vllm", "harness")


def _no_key() -> Refused:
    return Refused("this key is of no episode in progress", status=401, code="invalid_api_key")


def _refused(api: API, refused: Refused) -> Response:
    return _json(refused.status, api.problem(refused))


def _json(status: int, body: dict[str, Any]) -> Response:
    from starlette.responses import JSONResponse

    # No answer of this server is another one the next time: clients need not ask again.
    return JSONResponse(body, status, headers={"x-should-retry": "false"} if status >= 400 else None)
