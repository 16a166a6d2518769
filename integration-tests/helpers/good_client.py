"""Streams one after the other, in a process of its own: no other client of a test delays it.

    python good_client.py HOST PORT COUNT BODY

Prints the seconds from each request to its first event as JSON, and fails where a stream does not end as it should.
"""

from __future__ import annotations

import json
import socket
import sys
import time


def main(host: str, port: str, count: str, body: str) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head = f"{head}Content-Length: {len(body)}"
    times = []
    for _ in range(int(count)):
        with socket.create_connection((host, int(port)), timeout=60) as client:
            start_s = time.monotonic()
            client.sendall(f"{head}\r\nConnection: close\r\n\r\n{body}".encode())
            received, first_s = b"", 0.0
            while piece := client.recv(65536):
                received += piece
                if not first_s and b"data: " in received:
                    first_s = time.monotonic() - start_s
        if b" 200 " not in received[:20] or b"data: [DONE]" not in received:
            raise SystemExit(f"not a whole stream: {received[-300:]!r}")
        times.append(first_s)
    print(json.dumps(times))


if __name__ == "__main__":
    main(*sys.argv[1:])
