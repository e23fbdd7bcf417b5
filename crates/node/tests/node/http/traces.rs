//! Logs and traces: exported spans, lost spans, log formats, log lines at the start.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cascade_node::config::LogConfig;
use cascade_node::telemetry::{self, Spans, TraceContext, request_span};
use cascade_node::{Node, NodeConfig};
use cascade_store::{CallOptions, FilesConfig, KeepPool, Put};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use prost::Message;
use tracing_subscriber::fmt::MakeWriter;

use super::served;

const TRACE_PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// Lines kept in memory.
#[derive(Debug, Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

/// A collector that accepts every batch.
fn collector() -> (String, Receiver<ExportTraceServiceRequest>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Some(batch) = receive(stream.unwrap()) else { break };
            if sender.send(batch).is_err() {
                break;
            }
        }
    });
    (endpoint, receiver)
}

fn receive(mut stream: TcpStream) -> Option<ExportTraceServiceRequest> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let count = stream.read(&mut piece).ok().filter(|count| *count > 0)?;
        bytes.extend_from_slice(&piece[..count]);
        let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
        assert!(head.starts_with("post /v1/traces http/1.1"), "{head}");
        let length = head.split("content-length: ").nth(1).unwrap();
        let length: usize = length.lines().next().unwrap().parse().unwrap();
        if bytes.len() >= end + 4 + length {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
            return ExportTraceServiceRequest::decode(&bytes[end + 4..end + 4 + length]).ok();
        }
    }
}

#[test]
fn a_request_is_a_span_in_its_callers_trace() {
    let (endpoint, batches) = collector();
    let spans = Spans::open(&endpoint).unwrap();
    let lines = Lines::default();
    let subscriber =
        telemetry::subscriber(&LogConfig::default(), Some(&spans), false, lines.clone()).unwrap();
    tracing::subscriber::with_default(subscriber, || {
        let span = request_span("lookup", "default", TraceContext::parse(TRACE_PARENT));
        span.record("blocks", 12);
        span.in_scope(|| tracing::info!("inside"));
        drop(span);
        let unrecorded = TRACE_PARENT.replace("-01", "-00");
        drop(request_span("view", "default", TraceContext::parse(&unrecorded)));
        drop(request_span("seal", "default", None));
    });
    spans.close(Duration::from_secs(10));
    let batch = batches.recv_timeout(Duration::from_secs(10)).unwrap();
    let resource = &batch.resource_spans[0];
    let attributes = &resource.resource.as_ref().unwrap().attributes;
    assert!(attributes.iter().any(|attribute| attribute.key == "service.name"));
    let received = &resource.scope_spans[0].spans;
    let names: Vec<&str> = received.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["lookup", "seal"], "a trace that the client does not sample is skipped");
    let lookup = &received[0];
    assert_eq!(lookup.trace_id[..4], [0x4b, 0xf9, 0x2f, 0x35]);
    assert_eq!(lookup.parent_span_id, [0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7]);
    assert!(lookup.attributes.iter().any(|attribute| attribute.key == "blocks"));
    assert!(received[1].parent_span_id.is_empty(), "a trace of its own");
    assert_eq!((spans.status().exported_spans, spans.status().lost_spans), (2, 0));
    assert!(lines.text().contains("inside"), "{}", lines.text());
}

#[test]
fn spans_without_a_collector_are_counted_as_lost() {
    // The listener is dropped at once: its address refuses connections.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let spans = Spans::open(&format!("http://{address}")).unwrap();
    let subscriber =
        telemetry::subscriber(&LogConfig::default(), Some(&spans), false, io::sink).unwrap();
    tracing::subscriber::with_default(subscriber, || {
        for _ in 0..5000 {
            drop(request_span("view", "default", None));
        }
    });
    spans.close(Duration::from_secs(10));
    let status = spans.status();
    assert_eq!((status.exported_spans, status.lost_spans), (0, 5000), "every span is counted");
}

/// A collector that accepts connections and does this with each.
fn bad_collector(answer: impl Fn(TcpStream) -> Option<TcpStream> + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let kept: Vec<_> = listener.incoming().map(|stream| answer(stream.unwrap())).collect();
        drop(kept);
    });
    endpoint
}

#[test]
fn a_collector_that_hangs_delays_neither_requests_nor_the_stop() {
    let spans = Spans::open(&bad_collector(Some)).unwrap();
    let subscriber =
        telemetry::subscriber(&LogConfig::default(), Some(&spans), false, io::sink).unwrap();
    let start = Instant::now();
    tracing::subscriber::with_default(subscriber, || {
        for _ in 0..5000 {
            drop(request_span("view", "default", None));
        }
    });
    assert!(start.elapsed() < Duration::from_secs(4), "no request waits for the time limit of 5 s");
    spans.close(Duration::from_millis(500));
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    let status = spans.status();
    assert_eq!((status.exported_spans, status.lost_spans), (0, 5000), "every span is counted");
}

#[test]
fn spans_that_the_collector_refuses_are_counted_as_lost() {
    let spans = Spans::open(&bad_collector(|mut stream| {
        let mut bytes = Vec::new();
        let mut piece = [0; 4096];
        while !bytes.windows(4).any(|four| four == b"view") {
            let count = stream.read(&mut piece).unwrap();
            assert!(count > 0, "the whole request arrives");
            bytes.extend_from_slice(&piece[..count]);
        }
        stream.write_all(b"HTTP/1.1 500 Full\r\nContent-Length: 0\r\n\r\n").unwrap();
        None
    }))
    .unwrap();
    let subscriber =
        telemetry::subscriber(&LogConfig::default(), Some(&spans), false, io::sink).unwrap();
    tracing::subscriber::with_default(subscriber, || drop(request_span("view", "default", None)));
    spans.close(Duration::from_secs(10));
    assert_eq!((spans.status().exported_spans, spans.status().lost_spans), (0, 1));
}

#[test]
fn a_log_is_text_or_one_json_object_a_line() {
    let log_with = |json| {
        let lines = Lines::default();
        let log = LogConfig { json, filter: Some("info".to_owned()) };
        let subscriber = telemetry::subscriber(&log, None, false, lines.clone()).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(address = "127.0.0.1:1", "the port is served");
            tracing::debug!("below the level of the filter");
        });
        lines.text()
    };
    let text = log_with(false);
    assert!(text.contains("INFO") && text.contains("the port is served"), "{text}");
    assert!(!text.contains('\u{1b}'), "no colours outside a terminal");
    let json = log_with(true);
    assert_eq!(json.lines().count(), 1, "{json}");
    let object: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(object["message"], "the port is served");
    assert_eq!(object["address"], "127.0.0.1:1");
}

/// The node did not log the recovered blocks, nor those discarded for a changed size of DRAM.
#[test]
fn the_log_reports_recovered_and_discarded_blocks_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = NodeConfig::new(directory.path().join("socket"));
    config.store.dram_bytes = 8 << 20;
    config.pool_directory = Some(directory.path().to_owned());
    config.keep_pool = KeepPool::Always;
    let mut files = FilesConfig::new(directory.path().join("blocks"));
    (files.capacity_bytes, files.segment_bytes, files.direct) = (64 << 20, 4 << 20, false);
    "Dram|Files".clone_into(&mut config.store.pipeline);
    config.store.files = Some(files);
    let run = |config: &NodeConfig| {
        let lines = Lines::default();
        let log = LogConfig { json: true, filter: Some("info".to_owned()) };
        let subscriber = telemetry::subscriber(&log, None, false, lines.clone()).unwrap();
        let node =
            tracing::subscriber::with_default(subscriber, || Node::open(config.clone()).unwrap());
        (node, lines.text())
    };
    let (node, log) = run(&config);
    assert!(!log.contains("recovered blocks"), "there is no earlier run: {log}");
    let bytes = [7; 4096];
    for number in 0..10 {
        node.store().put(&[Put::new(served::key(number), &bytes)], CallOptions::default());
    }
    node.close().unwrap();
    drop(node);
    let (node, log) = run(&config);
    let line = |part: &str| log.lines().find(|line| line.contains(part)).unwrap_or_default();
    let memory = line("recovered blocks of the previous run in DRAM");
    assert!(memory.contains("\"blocks\":10") && memory.contains("40.0 KiB"), "{log}");
    let below = line("recovered blocks of earlier runs");
    assert!(below.contains("\"tier\":\"files\"") && below.contains("\"blocks\":10"), "{log}");
    let warm = node.status().tenants[0].warm_restart.clone().unwrap();
    assert_eq!((warm.recovered_blocks, warm.recovered_bytes), (10, 40960));
    node.close().unwrap();
    drop(node);
    config.store.dram_bytes = 16 << 20;
    let (node, log) = run(&config);
    let lost = log.lines().find(|line| line.contains("WARN")).unwrap_or_default();
    assert!(lost.contains("DRAM had 8.0 MiB and has 16.0 MiB now"), "{log}");
    assert_eq!(node.status().tenants[0].tiers[1].blocks, Some(10), "blocks in files are kept");
}
