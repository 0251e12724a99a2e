"""An OTLP/HTTP receiver on the loopback address, and how to read its spans and OTLP files."""

import base64
import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData


class Receiver(HTTPServer):
    """An OTLP/HTTP receiver: decodes with the official protobuf classes."""

    def __init__(self, status=200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = status
        self.paths = []
        self.spans = []
        self.services = set()
        self.thread = threading.Thread(target=self.serve_forever)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self):
        self.shutdown()
        self.server_close()
        self.thread.join(timeout=30)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        self.server.paths.append(self.path)
        for resource in request.resource_spans:
            self.server.services |= {a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *args):
        pass


def value(given):
    """Return a Python value; a list for an array."""
    found = getattr(given, given.WhichOneof("value"))
    return [value(each) for each in found.values] if hasattr(found, "values") else found


def attributes(span):
    """Return a span's attributes."""
    return {each.key: value(each.value) for each in span.attributes}


def spans_of(lines):
    """Return the spans of an OTLP file; its ids are hexadecimal, the official classes want base64."""
    found = []
    for line in lines:
        content = json.loads(line)
        for resource in content["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    assert (32, 16) == (len(span["traceId"]), len(span["spanId"]))
                    for name in {"traceId", "spanId", "parentSpanId"} & set(span):
                        span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
        decoded = Parse(json.dumps(content), TracesData())
        found += [s for r in decoded.resource_spans for scope in r.scope_spans for s in scope.spans]
    return found
