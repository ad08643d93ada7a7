# SPDX-License-Identifier: Apache-2.0
"""A collector of OTLP traces over HTTP, in this process."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """`with Collector() as collector:`; spans of torpor as they have come, by name."""

    spans: list = field(default_factory=list)

    def __enter__(self):
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                spans.extend(span for of in sent.resource_spans for scope in of.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list:
        return [span for span in list(self.spans) if span.name == name]

    def inside(self, span) -> list:
        """Its children, as they began."""
        children = [each for each in list(self.spans) if each.parent_span_id == span.span_id]
        return sorted(children, key=lambda each: each.start_time_unix_nano)


def attributes(span) -> dict:
    """With their values as Python has them."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
