"""Calls of a served store are spans of their caller's trace, as an OTLP collector receives them."""

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
    """Take every batch of spans, and keep its bytes."""
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
            # Another thread's calls are not this one's.
            thread = threading.Thread(target=store.contains, args=(keys,))
            thread.start()
            thread.join()
            store.lookup_prefix(keys)
        store.lookup_prefix(keys)

    def told():
        return b"".join(batches)

    eventually(lambda: told().count(b"lookup") >= 3)
    # A trace's number and the number of the span above it, as protobuf has them: no other bytes.
    assert told().count(TRACE) == 2
    assert told().count(SPAN) == 2
    # Whom the caller does not record, the node does not.
    assert OTHER not in told()


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
