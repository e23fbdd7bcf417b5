"""Calls of a served store are child spans of the caller's trace, checked at an OTLP collector."""

import http.server
import threading

import cascadekv
import pytest
from cascadekv import BlockKey, part_of_trace

TRACE = bytes(range(16))
SPAN = bytes(range(200, 208))
OTHER = bytes(range(100, 116))


def traceparent(trace=TRACE, *, is_sampled=True):
    return f"00-{trace.hex()}-{SPAN.hex()}-{'01' if is_sampled else '00'}"


@pytest.fixture
def collector():
    """Run a collector that keeps the bytes of every batch of spans."""
    batches = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            batches.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", batches
    server.shutdown()
    thread.join()
    server.server_close()


def test_calls_are_child_spans_of_the_caller(serve, collector, eventually):
    endpoint, batches = collector
    node = serve("--dram", "16MiB", traces_endpoint=endpoint)
    keys = [BlockKey(bytes([7]) * 32)]
    with cascadekv.connect(node.socket) as store:
        store.put(keys, [b"kv"])
        with part_of_trace(traceparent()):
            store.lookup_prefix(keys)
            with part_of_trace(traceparent(OTHER, is_sampled=False)):
                store.lookup_prefix(keys)
            # Calls of other threads are not part of this thread's trace.
            thread = threading.Thread(target=store.contains, args=(keys,))
            thread.start()
            thread.join()
            store.lookup_prefix(keys)
        store.lookup_prefix(keys)

    def received():
        return b"".join(batches)

    eventually(lambda: received().count(b"lookup") >= 3)
    # Trace and parent span ids occur in protobuf as plain bytes.
    assert received().count(TRACE) == 2
    assert received().count(SPAN) == 2
    # The node does not record traces that the caller did not sample.
    assert OTHER not in received()


@pytest.mark.parametrize(
    "text", [None, "", "00", traceparent()[:-1], traceparent().upper(), traceparent(bytes(16))]
)
def test_an_invalid_traceparent_is_no_trace(text):
    with part_of_trace(traceparent()), part_of_trace(text):
        assert cascadekv._native.replace_trace(None) is None  # noqa: SLF001


def test_nested_traces_are_restored_after_an_error():
    with part_of_trace(traceparent()):
        with pytest.raises(ZeroDivisionError), part_of_trace(traceparent(OTHER)):
            raise ZeroDivisionError
        assert cascadekv._native.replace_trace(traceparent()) == traceparent()  # noqa: SLF001
    assert cascadekv._native.replace_trace(None) is None  # noqa: SLF001
