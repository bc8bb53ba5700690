"""Running a server: uvicorn on one port, one process, until it is told to stop."""

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from proxreplay.errors import InputError
from proxreplay.serving.access import Access
from proxreplay.serving.api import make_app
from proxreplay.serving.service import Service

REQUEST_SECONDS = 15.0  # to send the head of a request, or to read something of an answer
SWITCH = 0.0005  # seconds after which Python lets another thread on; predictions wait less


def run(service: Service, access: Access, listening: socket.socket) -> None:
    """Answer requests until a signal; the service is closed then. For ``listening``: `listen`."""
    sys.setswitchinterval(SWITCH)
    server = made(service, access)
    host, port = listening.getsockname()[:2]
    print(f"http://{f'[{host}]' if ':' in host else host}:{port}/", flush=True)
    server.run(sockets=[listening])


def made(service: Service, access: Access) -> uvicorn.Server:
    """The server, see `run`."""
    config = uvicorn.Config(
        make_app(service, access),
        http=_Impatient,
        ws="none",
        log_level="warning",
        access_log=False,
        limit_concurrency=service.options.connections,
        timeout_graceful_shutdown=10,
        server_header=False,
    )
    return uvicorn.Server(config)


class _Impatient(H11Protocol):
    """A connection that ends if its client does nothing; uvicorn would wait for it forever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look(None)

    def _look(self, before: Any) -> None:
        """Look again and again whether it waits for the same thing from the client as before."""
        unread = self.transport.get_write_buffer_size()
        over = self.cycle is None or self.cycle.response_complete
        now = (self.cycle, unread) if over or unread else None
        if now is not None and now == before:
            self.transport.abort()
        else:
            self._next = self.loop.call_later(REQUEST_SECONDS, self._look, now)

    def connection_lost(self, exc: Exception | None) -> None:
        self._next.cancel()
        super().connection_lost(exc)


def listen(host: str, port: int, waiting: int) -> socket.socket:
    """A socket that listens; whoever comes from now on only waits. Port 0 is any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio only sends answers at once (TCP_NODELAY) if the protocol is named
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(waiting)
    except OSError as error:
        listening.close()
        raise InputError(f"--host {host} --port {port}: {error}; choose another.") from error
    return listening
