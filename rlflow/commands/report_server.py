"""`rlflow report --html --watch`: the page of runs in progress, served on the loopback alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rlflow.errors import UserError
from rlflow.loggers.jsonl import METRICS_FILE


def open_server(folders: Sequence[Path], make: Callable[[str], str]) -> ThreadingHTTPServer:
    """A server at a free port of 127.0.0.1: `/` is the page, `/version` changes when the metrics of a run grow.

    Args:
        folders: Folders of the runs.
        make: Makes the page from a version; called when `/` is asked for and the metrics have grown.
    """
    lock = threading.Lock()  # a browser asks several things at a time, and the page is made once
    made = {"version": "", "page": ""}

    def version() -> str:
        return "-".join(str((folder / METRICS_FILE).stat().st_size) for folder in folders)

    def page() -> str:
        with lock:
            now = version()
            if made["version"] != now:
                made["page"] = make(now)
                made["version"] = now
            return made["page"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
                self.send_error(403)  # another site's name that leads here: that site would read the samples
                return
            answers = {"/": ("text/html", page), "/version": ("text/plain", version)}
            if self.path not in answers:
                self.send_error(404)
                return
            kind, answer = answers[self.path]
            try:
                code, text = 200, answer()
            except UserError as error:
                code, kind, text = 500, "text/plain", str(error)
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing for a request."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server
