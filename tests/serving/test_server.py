"""The process around the HTTP interface."""

import asyncio
import socket
from pathlib import Path

from typer.testing import CliRunner

from proxreplay.cli import app
from proxreplay.errors import InputError
from proxreplay.serving.server import listen

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


def test_a_port_that_is_taken_leaves_no_folder(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0, 5) as taken:
        port = str(taken.getsockname()[1])
        command = ["serve", str(tmp_path / "d"), "--port", port, "--learner", f"{LEARNER}:make"]
        done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, InputError)
    assert "Address already in use; choose another" in str(done.exception)
    assert not (tmp_path / "d").exists()
