"""A server that costs little: one small write per token and stream, every few milliseconds, in its own process."""

from __future__ import annotations

import asyncio
import sys

TOKEN_DELAY_S = 0.005
EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
END = b'data: {"choices":[],"usage":{"prompt_tokens":128,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_tokens: int) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
            writer.write(HEAD)
            for _ in range(num_tokens):
                await asyncio.sleep(TOKEN_DELAY_S)
                writer.write(chunk(EVENT))
            writer.write(chunk(END % num_tokens) + b"0\r\n\r\n")
    except asyncio.IncompleteReadError:
        writer.close()


async def main(num_tokens: int) -> None:
    server = await asyncio.start_server(lambda reader, writer: answer(reader, writer, num_tokens), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
