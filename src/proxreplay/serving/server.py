"""Running a server: uvicorn on one port, one process, until it is told to stop."""

import socket
import sys

import uvicorn

from proxreplay.errors import InputError
from proxreplay.serving.access import Access
from proxreplay.serving.api import make_app
from proxreplay.serving.service import Service

SWITCH = 0.0005  # seconds after which Python lets another thread on; predictions wait less


def run(service: Service, access: Access, listening: socket.socket) -> None:
    """Answer requests until a signal; the service is closed then.

    Args:
        service: that answers.
        access: who may.
        listening: from `listen`.
    """
    sys.setswitchinterval(SWITCH)
    config = uvicorn.Config(
        make_app(service, access),
        log_level="warning",
        access_log=False,
        limit_concurrency=service.options.connections,
        timeout_graceful_shutdown=10,
        server_header=False,
    )
    host, port = listening.getsockname()[:2]
    print(f"http://{f'[{host}]' if ':' in host else host}:{port}/", flush=True)
    uvicorn.Server(config).run(sockets=[listening])


def listen(host: str, port: int, waiting: int) -> socket.socket:
    """A socket that listens; whoever comes from now on only waits.

    Args:
        host: to listen on.
        port: 0 for any that is free.
        waiting: how many may wait.
    """
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
