"""The process around the HTTP interface."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proxreplay.cli import app
from proxreplay.errors import InputError
from proxreplay.serving import DurableLearner, server
from proxreplay.serving.access import Access
from proxreplay.serving.server import listen
from proxreplay.serving.service import Service
from tests.serving.streams import make

ANSWERED = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LEARNER = Path(__file__).parents[2] / "examples" / "serve" / "learner.py"


def test_answers_are_sent_at_once() -> None:
    """Otherwise the body of every answer waits 40 ms for the client to confirm the headers."""

    async def no_delay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen("127.0.0.1", 0, 5) as listening:
            async with await asyncio.start_server(accept, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                answer = await found
                writer.close()
                await writer.wait_closed()
        return answer

    assert asyncio.run(no_delay())


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:", ANSWERED + b"GET /"])
def test_a_connection_on_which_no_request_comes_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Otherwise a few silent connections keep everybody else out."""
    with (
        running(tmp_path, monkeypatch) as address,
        socket.create_connection(address, timeout=60) as client,
    ):
        client.sendall(sent)
        received = b""
        while part := client.recv(1000):
            received += part
    assert received.count(b"200 OK") == sent.count(ANSWERED)


def test_a_client_that_does_not_read_its_answers_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a token: the page may be asked for by anybody."""
    asked = ANSWERED.replace(b"/health", b"/") * 100

    def ask_on(client: socket.socket) -> None:
        for _ in range(300):
            with suppress(TimeoutError):
                while True:
                    client.send(asked)

    with running(tmp_path, monkeypatch) as address, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(0.1)
        client.connect(address)
        with pytest.raises(ConnectionError):
            ask_on(client)


@contextmanager
def running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server that loses patience soon, and where it is."""
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)
    service = Service(DurableLearner(folder / "d", make()))
    with listen("127.0.0.1", 0, 5) as listening:
        uvicorn = server.made(service, Access())
        thread = threading.Thread(target=uvicorn.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            uvicorn.should_exit = True
            thread.join()


def test_a_port_that_is_taken_leaves_no_folder(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0, 5) as taken:
        port = str(taken.getsockname()[1])
        command = ["serve", str(tmp_path / "d"), "--port", port, "--learner", f"{LEARNER}:make"]
        done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, InputError)
    assert "Address already in use; choose another" in str(done.exception)
    assert not (tmp_path / "d").exists()
