//! Metric families of the process, its clients, HTTP and traces.

use crate::metrics::{MetricFamily, MetricKind};
use crate::status::{NodeState, PeerStatus};

/// The families, in the order of a scrape.
pub(super) const FAMILIES: &[MetricFamily] = &[
    MetricFamily {
        name: "cascade_build_info",
        kind: MetricKind::Gauge,
        help: "Always 1, with the version as a label",
        labels: &["version"],
        read: |status, samples| {
            samples.add(&[&status.node.version], 1);
        },
    },
    MetricFamily {
        name: "cascade_node_state",
        kind: MetricKind::Gauge,
        help: "1 for the current state of the node, 0 for the others",
        labels: &["state"],
        read: |status, samples| {
            for state in NodeState::ALL {
                samples.add(&[state.name()], u64::from(state == status.node.state));
            }
        },
    },
    MetricFamily {
        name: "cascade_uptime_seconds",
        kind: MetricKind::Gauge,
        help: "Time since the node started",
        labels: &[],
        read: |status, samples| {
            samples.add_float(&[], status.node.uptime_s);
        },
    },
    MetricFamily {
        name: "process_cpu_seconds",
        kind: MetricKind::Counter,
        help: "Total user and system CPU time spent in seconds",
        labels: &[],
        read: |status, samples| {
            samples.add_float(&[], status.node.cpu_s);
        },
    },
    MetricFamily {
        name: "process_resident_memory_bytes",
        kind: MetricKind::Gauge,
        help: "Resident memory size in bytes, including touched pages of the pools",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.node.memory_bytes);
        },
    },
    MetricFamily {
        name: "process_virtual_memory_bytes",
        kind: MetricKind::Gauge,
        help: "Virtual memory size in bytes",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.node.virtual_memory_bytes);
        },
    },
    MetricFamily {
        name: "process_open_fds",
        kind: MetricKind::Gauge,
        help: "Number of open file descriptors",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.node.open_files);
        },
    },
    MetricFamily {
        name: "process_max_fds",
        kind: MetricKind::Gauge,
        help: "Maximum number of open file descriptors",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.node.open_files_max);
        },
    },
    MetricFamily {
        name: "process_start_time_seconds",
        kind: MetricKind::Gauge,
        help: "Start time of the process since unix epoch in seconds",
        labels: &[],
        read: |status, samples| {
            samples.add_float(&[], status.node.started_unix_s);
        },
    },
    MetricFamily {
        name: "process_threads",
        kind: MetricKind::Gauge,
        help: "Number of OS threads in the process",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.node.threads);
        },
    },
    MetricFamily {
        name: "cascade_peer_state",
        kind: MetricKind::Gauge,
        help: "1 for the current state of another node of the cluster, 0 for the others",
        labels: &["node", "state"],
        read: |status, samples| {
            for node in status.cluster.iter().flat_map(|cluster| &cluster.nodes) {
                for state in PeerStatus::STATES {
                    samples.add(&[&node.name, state], u64::from(state == node.state));
                }
            }
        },
    },
    MetricFamily {
        name: "cascade_peer_fetched_blocks",
        kind: MetricKind::Counter,
        help: "Blocks fetched from another node of the cluster",
        labels: &["node"],
        read: |status, samples| {
            for node in status.cluster.iter().flat_map(|cluster| &cluster.nodes) {
                samples.add(&[&node.name], node.fetched_blocks);
            }
        },
    },
    MetricFamily {
        name: "cascade_peer_fetched_bytes",
        kind: MetricKind::Counter,
        help: "Bytes of the blocks fetched from another node of the cluster",
        labels: &["node"],
        read: |status, samples| {
            for node in status.cluster.iter().flat_map(|cluster| &cluster.nodes) {
                samples.add(&[&node.name], node.fetched_bytes);
            }
        },
    },
    MetricFamily {
        name: "cascade_clients",
        kind: MetricKind::Gauge,
        help: "Clients connected to the Unix socket",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.connected);
        },
    },
    MetricFamily {
        name: "cascade_stopped_clients",
        kind: MetricKind::Gauge,
        help: "Clients stopped by a signal",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.stopped);
        },
    },
    MetricFamily {
        name: "cascade_silent_clients",
        kind: MetricKind::Gauge,
        help: "Clients that hold leases and have been idle for a minute",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.silent);
        },
    },
    MetricFamily {
        name: "cascade_reaped_clients",
        kind: MetricKind::Counter,
        help: "Clients that disconnected or died while they held leases or reservations",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.reaped);
        },
    },
    MetricFamily {
        name: "cascade_leases",
        kind: MetricKind::Gauge,
        help: "Blocks under lease",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.leases);
        },
    },
    MetricFamily {
        name: "cascade_leased_bytes",
        kind: MetricKind::Gauge,
        help: "Bytes under lease",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.leased_bytes);
        },
    },
    MetricFamily {
        name: "cascade_filling_bytes",
        kind: MetricKind::Gauge,
        help: "Bytes reserved by clients and not sealed yet",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.reserved_bytes);
        },
    },
    MetricFamily {
        name: "cascade_oldest_lease_seconds",
        kind: MetricKind::Gauge,
        help: "Age of the oldest lease, 0 if there is none",
        labels: &[],
        read: |status, samples| {
            samples.add_float(&[], status.clients.oldest_lease_s.unwrap_or(0.0));
        },
    },
    MetricFamily {
        name: "cascade_request_duration_seconds",
        kind: MetricKind::Histogram,
        help: "Duration of a request on the Unix socket",
        labels: &["operation"],
        read: |status, samples| {
            for op in &status.server.operations {
                samples.add_histogram(&[&op.operation], &op.duration_s);
            }
        },
    },
    MetricFamily {
        name: "cascade_request_failures",
        kind: MetricKind::Counter,
        help: "Requests on the Unix socket that failed as a whole",
        labels: &["operation"],
        read: |status, samples| {
            for op in &status.server.operations {
                samples.add(&[&op.operation], op.failures);
            }
        },
    },
    MetricFamily {
        name: "cascade_request_blocks",
        kind: MetricKind::Histogram,
        help: "Blocks per request",
        labels: &["operation"],
        read: |status, samples| {
            for op in &status.server.operations {
                samples.add_histogram(&[&op.operation], &op.blocks);
            }
        },
    },
    MetricFamily {
        name: "cascade_request_bytes",
        kind: MetricKind::Histogram,
        help: "Bytes of the blocks that a request copied or leased",
        labels: &["operation"],
        read: |status, samples| {
            for op in &status.server.operations {
                samples.add_histogram(&[&op.operation], &op.bytes);
            }
        },
    },
    MetricFamily {
        name: "cascade_request_speed_bytes_per_second",
        kind: MetricKind::Histogram,
        help: "Throughput of requests that copied or leased blocks",
        labels: &["operation"],
        read: |status, samples| {
            for op in &status.server.operations {
                samples.add_histogram(&[&op.operation], &op.bytes_per_second);
            }
        },
    },
    MetricFamily {
        name: "cascade_lookup_hit_blocks",
        kind: MetricKind::Histogram,
        help: "Leading blocks that a lookup matched",
        labels: &[],
        read: |status, samples| {
            samples.add_histogram(&[], &status.server.lookup_hit_blocks);
        },
    },
    MetricFamily {
        name: "cascade_lookup_hit_ratio",
        kind: MetricKind::Histogram,
        help: "Share of the blocks of a lookup that matched, 0 to 1",
        labels: &[],
        read: |status, samples| {
            samples.add_histogram(&[], &status.server.lookup_hit_ratio);
        },
    },
    MetricFamily {
        name: "cascade_http_connections",
        kind: MetricKind::Gauge,
        help: "Open HTTP connections",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.server.http.connections);
        },
    },
    MetricFamily {
        name: "cascade_http_requests",
        kind: MetricKind::Counter,
        help: "HTTP requests",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.server.http.requests);
        },
    },
    MetricFamily {
        name: "cascade_http_refused",
        kind: MetricKind::Counter,
        help: "HTTP requests refused for a missing or wrong token, or a wrong Host header",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.server.http.refused);
        },
    },
    MetricFamily {
        name: "cascade_http_turned_away",
        kind: MetricKind::Counter,
        help: "HTTP connections limited to health checks or refused at the connection limit",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.server.http.turned_away);
        },
    },
    MetricFamily {
        name: "cascade_http_handshake_failures",
        kind: MetricKind::Counter,
        help: "TLS handshakes that failed",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.server.http.handshake_failures);
        },
    },
    MetricFamily {
        name: "cascade_exported_spans",
        kind: MetricKind::Counter,
        help: "Spans accepted by the trace collector",
        labels: &[],
        read: |status, samples| {
            if let Some(traces) = &status.traces {
                samples.add(&[], traces.exported_spans);
            }
        },
    },
    MetricFamily {
        name: "cascade_lost_spans",
        kind: MetricKind::Counter,
        help: "Spans dropped because the trace collector was slow, unavailable or refused them",
        labels: &[],
        read: |status, samples| {
            if let Some(traces) = &status.traces {
                samples.add(&[], traces.lost_spans);
            }
        },
    },
];
