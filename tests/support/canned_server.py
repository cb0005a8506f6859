"""A program that serves like vLLM or llama.cpp: it is healthy at once and streams the events it was given.

`python canned_server.py EVENTS … --port PORT …`: EVENTS is a JSON file with the events as strings. The program answers
every POST with them as server-sent events, in HTTP chunks that end in the middle of lines. Run by `test_http_servers`.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_CHUNK_BYTES = 7


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    events: tuple[str, ...] = ()

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not request["prompt"]:
            self._refuse(b'{"error": "the prompt is empty"}')
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        body = "".join(f"data: {event}\n\n" for event in self.events).encode()
        for start in range(0, len(body), _CHUNK_BYTES):
            chunk = body[start : start + _CHUNK_BYTES]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    def _refuse(self, body: bytes) -> None:
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


def main() -> None:
    """Serve until the process is ended."""
    _Handler.events = tuple(json.loads(Path(sys.argv[1]).read_text()))
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), _Handler).serve_forever()


if __name__ == "__main__":
    main()
