"""A server on this machine that serves real, broken and hostile files."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

from proxreplay.data import catalog
from proxreplay.data.catalog import RemoteFile
from proxreplay.data.fetch import Patience

QUICK = Patience(attempts=4, wait=0.0, timeout=5.0)


@dataclass
class Server:
    """What is served, how it misbehaves, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)  # bytes sent before the line breaks
    errors: list[int] = field(default_factory=list)  # status codes to answer first
    ranges: bool = True
    wrong_range: bool = False
    announce_length: bool = True
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""


def handler_for(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *args):
            pass

        def do_GET(self):
            wanted = self.headers["Range"]
            server.requests.append((self.path, wanted))
            if server.errors:
                return self.send_error(server.errors.pop(0))
            if self.path not in server.files:
                return self.send_error(404)
            content = server.files[self.path]
            start = 0
            if wanted and server.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    return self.send_error(416)
                self.send_response(206)
                shown = start + 1 if server.wrong_range else start
                self.send_header(
                    "Content-Range", f"bytes {shown}-{len(content) - 1}/{len(content)}"
                )
            else:
                self.send_response(200)
            body = content[start:]
            if server.announce_length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: server.cut_after.pop(0)] if server.cut_after else body)

    return Handler


@contextmanager
def served() -> Iterator[Server]:
    """A server while the block runs."""
    state = Server()
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler_for(state))
    state.address = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@contextmanager
def published(name: str, url: str, content: bytes, unpack_to: str | None = None) -> Iterator[None]:
    """A data set that is one file at this address, with its checksum."""
    file = RemoteFile(url, hashlib.md5(content).hexdigest(), unpack_to=unpack_to)
    known = replace(catalog.CATALOG[name], files=(file,))
    with mock.patch.dict(catalog.CATALOG, {name: known}):
        yield
