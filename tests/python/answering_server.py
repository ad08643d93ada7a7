# SPDX-License-Identifier: Apache-2.0
"""A server that records answers as strictly as torpor's, and breaks connections where the test says so."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TEXT = ["The sea ", "is wide", ", naïve ", "and 🌊 deep", "."]  # of each choice, piece by piece


class AnsweringServer:
    def __init__(self, choices: int = 1, stream_piece: int = 3):
        self.choices, self.stream_piece = choices, stream_piece
        self.cuts: list[int | None] = []  # of the next bodies: after how many bytes they break
        self.resets = False  # a broken connection also loses what was sent and has not arrived
        self.lost = 0  # so many of the next POSTs never arrive
        self.statuses: list[int] = []  # of the next calls, instead of an answer
        self.error_event: int | None = None  # of the next stream: after so many chunks it says that it gave up
        self.error_code = 500
        self.refused = False  # the next stream is nothing but an error event, and not recorded
        self.running = 0  # so many times a whole answer is said to be running
        self.answers: dict[str, dict] = {}
        self.calls: list[str] = []
        self.headers: list[dict] = []  # of each call
        self.cut_off: tuple[str, str | None] | None = None  # finish and stop reason of answers that are taken up
        self.parsed: list[str] = []  # what it says that it parses
        self.extra: dict = {}  # in each delta
        self.goes_on = False  # it says that a request outlives its connection
        self.holds: threading.Event | None = None  # whole answers, and the ends of streams, wait for it
        outer = self

        class Handler(_Handler):
            server_of_answers = outer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_of_answers: AnsweringServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        """Say nothing."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that has all it wants
            super().handle()

    def do_POST(self) -> None:
        server = self.server_of_answers
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request_id = self.headers["X-Request-Id"]
        server.calls.append(f"POST {request_id}")
        server.headers.append(dict(self.headers))
        if server.lost > 0:
            server.lost -= 1
            return self._break()
        if server.statuses:
            return self._json({"error": "as the test says"}, server.statuses.pop(0))
        if request_id in server.answers:
            return self._json({"error": "used"}, 409)
        if server.refused:
            server.refused, server.error_event = False, 0
            return self._stream([0] * server.choices, chat=True)
        server.answers[request_id] = body
        if server.holds is not None and not body.get("stream"):
            server.holds.wait(10)
        if body.get("stream"):
            return self._stream([0] * server.choices, chat="messages" in body)
        self._json(self._whole(request_id) | {"created": 1, "object": "chat.completion"})

    def do_GET(self) -> None:
        server, address = self.server_of_answers, urlsplit(self.path)
        server.calls.append(f"GET {address.path}?{address.query}")
        server.headers.append(dict(self.headers))
        if server.statuses:
            return self._json({"error": "as the test says"}, server.statuses.pop(0))
        assert self.headers["Authorization"] == "Bearer key", "the key is missing"
        request_id = unquote(address.path.removeprefix("/torpor/requests/").removesuffix("/stream"))
        if request_id not in server.answers:
            return self._json({"error": {"code": "not_found"}}, 404)
        if not address.path.endswith("/stream"):
            state = "running" if server.running > 0 else "ended"
            server.running -= 1
            about = {"state": state, "object": "torpor.response", "parsed": server.parsed}
            return self._json(self._whole(request_id) | about)
        starts = [int(each) for each in parse_qs(address.query)["from_text"][0].split(",")]
        assert len(starts) == server.choices and all(start <= len("".join(TEXT)) for start in starts), starts
        self._stream(starts, chat="messages" in server.answers[request_id])

    def do_DELETE(self) -> None:
        server = self.server_of_answers
        server.calls.append(f"DELETE {self.path}")
        server.headers.append(dict(self.headers))
        self._json({"aborted": 1})

    def _whole(self, request_id: str) -> dict:
        finish, stop = self._end()
        choices = [
            {"index": index, "state": "finished", "text": "".join(TEXT), "token_ids": [], "finish_reason": finish,
             "stop_reason": stop, "message": {"role": "assistant", "content": "".join(TEXT)}}
            for index in range(self.server_of_answers.choices)
        ]  # fmt: skip
        return {"id": f"chatcmpl-{request_id}", "choices": choices}

    def _end(self) -> tuple[str, str | None]:
        cut_off = self.server_of_answers.cut_off
        return cut_off if cut_off is not None and self.command == "GET" else ("length", None)

    def _stream(self, starts: list[int], chat: bool) -> None:
        server = self.server_of_answers
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        if server.parsed and self.command == "GET":
            self.send_header("X-Torpor-Parsed", ", ".join(server.parsed))
        self._say_that_it_goes_on()
        self.end_headers()
        body = b": keep-alive\n\n"
        chunks = 0
        for number, piece in enumerate(TEXT):
            for index, start in enumerate(starts):
                begin = len("".join(TEXT[:number]))
                rest = piece[max(0, start - begin) :]
                last = number == len(TEXT) - 1
                if not rest and not last:
                    continue
                if server.error_event == chunks:
                    server.error_event = None
                    error = {"message": "the engine is gone", "code": server.error_code}
                    return self._send(
                        body + b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"
                    )
                chunks += 1
                text = {"delta": {"content": rest} | server.extra} if chat else {"text": rest}
                finish, stop = self._end() if last else (None, None)
                choice = {"index": index, "finish_reason": finish, "stop_reason": stop} | text
                if self.command == "GET":  # as torpor numbers them for whoever takes up an answer
                    body += f"id: {number}\n".encode()
                body += b"data: " + json.dumps({"id": "x", "choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"
                body += b": asleep\n\n" if number % 4 == 0 else b""
        self._send(body + b"data: [DONE]\n\n")

    def _send(self, body: bytes) -> None:
        server = self.server_of_answers
        cut = server.cuts.pop(0) if server.cuts else None
        for at in range(0, len(body) if cut is None else cut, server.stream_piece):
            piece = body[at : at + server.stream_piece][: None if cut is None else cut - at]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
            if server.holds is not None and at + server.stream_piece > len(body) // 2:
                server.holds.wait(10)
        if cut is not None:
            return self._break()
        self.wfile.write(b"0\r\n\r\n")

    def _json(self, content: dict, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self._say_that_it_goes_on()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _say_that_it_goes_on(self) -> None:
        if self.server_of_answers.goes_on and self.command == "POST":
            self.send_header("X-Torpor-On-Disconnect", "continue")

    def _break(self) -> None:
        """End the connection without a word."""
        self.wfile.flush()
        self.close_connection = True
        if self.server_of_answers.resets:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.rfile.close()
