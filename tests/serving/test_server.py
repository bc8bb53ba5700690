"""The process around the HTTP interface."""

import asyncio
import socket

from proxreplay.serving.server import listen


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
