//! Metric families of the process, its clients and its ports.

use crate::metrics::{Family, Kind};
use crate::status::NodeState;

/// These families, in the order of a scrape.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "cascade_build_info",
        kind: Kind::Gauge,
        help: "1, labelled with the version that runs",
        labels: &["version"],
        read: |status, samples| {
            samples.add(&[&status.node.version], 1);
        },
    },
    Family {
        name: "cascade_node_state",
        kind: Kind::Gauge,
        help: "1 for the state that the node is in, 0 for the others",
        labels: &["state"],
        read: |status, samples| {
            for state in NodeState::ALL {
                samples.add(&[state.name()], u64::from(state == status.node.state));
            }
        },
    },
    Family {
        name: "cascade_uptime_seconds",
        kind: Kind::Gauge,
        help: "Time since the node started",
        labels: &[],
        read: |status, samples| {
            samples.add_real(&[], status.node.uptime_s);
        },
    },
    Family {
        name: "process_cpu_seconds",
        kind: Kind::Counter,
        help: "Total user and system CPU time spent in seconds",
        labels: &[],
        read: |status, samples| {
            samples.add_real(&[], status.node.cpu_s);
        },
    },
    Family {
        name: "process_resident_memory_bytes",
        kind: Kind::Gauge,
        help: "Resident memory size in bytes, touched pages of the pools included",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.node.memory_bytes);
        },
    },
    Family {
        name: "process_virtual_memory_bytes",
        kind: Kind::Gauge,
        help: "Virtual memory size in bytes",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.node.virtual_memory_bytes);
        },
    },
    Family {
        name: "process_open_fds",
        kind: Kind::Gauge,
        help: "Number of open file descriptors",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.node.open_files);
        },
    },
    Family {
        name: "process_max_fds",
        kind: Kind::Gauge,
        help: "Maximum number of open file descriptors",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.node.open_files_max);
        },
    },
    Family {
        name: "process_start_time_seconds",
        kind: Kind::Gauge,
        help: "Start time of the process since unix epoch in seconds",
        labels: &[],
        read: |status, samples| {
            samples.add_real(&[], status.node.started_unix_s);
        },
    },
    Family {
        name: "process_threads",
        kind: Kind::Gauge,
        help: "Number of OS threads in the process",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.node.threads);
        },
    },
    Family {
        name: "cascade_clients",
        kind: Kind::Gauge,
        help: "Clients connected to the Unix socket",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.connected);
        },
    },
    Family {
        name: "cascade_stopped_clients",
        kind: Kind::Gauge,
        help: "Clients that a signal stopped",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.stopped);
        },
    },
    Family {
        name: "cascade_silent_clients",
        kind: Kind::Gauge,
        help: "Clients that hold leases without a word for a minute",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.silent);
        },
    },
    Family {
        name: "cascade_reaped_clients",
        kind: Kind::Counter,
        help: "Clients that were cut off or died while they held something",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.reaped);
        },
    },
    Family {
        name: "cascade_leases",
        kind: Kind::Gauge,
        help: "Blocks under lease",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.leases);
        },
    },
    Family {
        name: "cascade_leased_bytes",
        kind: Kind::Gauge,
        help: "Bytes under lease",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.leased_bytes);
        },
    },
    Family {
        name: "cascade_filling_bytes",
        kind: Kind::Gauge,
        help: "Bytes that clients reserved and are filling",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.clients.reserved_bytes);
        },
    },
    Family {
        name: "cascade_oldest_lease_seconds",
        kind: Kind::Gauge,
        help: "Age of the oldest lease, 0 without any",
        labels: &[],
        read: |status, samples| {
            samples.add_real(&[], status.clients.oldest_lease_s.unwrap_or(0.0));
        },
    },
    Family {
        name: "cascade_request_duration_seconds",
        kind: Kind::Histogram,
        help: "Time from a request on the Unix socket to its answer",
        labels: &["operation"],
        read: |status, samples| {
            for op in &status.server.operations {
                samples.add_histogram(&[&op.operation], &op.duration_s);
            }
        },
    },
    Family {
        name: "cascade_request_failures",
        kind: Kind::Counter,
        help: "Requests on the Unix socket that failed as a whole",
        labels: &["operation"],
        read: |status, samples| {
            for op in &status.server.operations {
                samples.add(&[&op.operation], op.failures);
            }
        },
    },
    Family {
        name: "cascade_request_blocks",
        kind: Kind::Histogram,
        help: "Blocks in a request",
        labels: &["operation"],
        read: |status, samples| {
            for op in &status.server.operations {
                samples.add_histogram(&[&op.operation], &op.blocks);
            }
        },
    },
    Family {
        name: "cascade_request_bytes",
        kind: Kind::Histogram,
        help: "Bytes of the blocks that a request moved or leased",
        labels: &["operation"],
        read: |status, samples| {
            for op in &status.server.operations {
                samples.add_histogram(&[&op.operation], &op.bytes);
            }
        },
    },
    Family {
        name: "cascade_request_speed_bytes_per_second",
        kind: Kind::Histogram,
        help: "Bytes a second of a request that moved or leased bytes",
        labels: &["operation"],
        read: |status, samples| {
            for op in &status.server.operations {
                samples.add_histogram(&[&op.operation], &op.bytes_per_second);
            }
        },
    },
    Family {
        name: "cascade_lookup_hit_blocks",
        kind: Kind::Histogram,
        help: "Leading blocks that a lookup found",
        labels: &[],
        read: |status, samples| {
            samples.add_histogram(&[], &status.server.lookup_hit_blocks);
        },
    },
    Family {
        name: "cascade_lookup_hit_ratio",
        kind: Kind::Histogram,
        help: "Share of a lookup's blocks that were found, 0 to 1",
        labels: &[],
        read: |status, samples| {
            samples.add_histogram(&[], &status.server.lookup_hit_ratio);
        },
    },
    Family {
        name: "cascade_http_connections",
        kind: Kind::Gauge,
        help: "Connections to the TCP port",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.server.http.connections);
        },
    },
    Family {
        name: "cascade_http_requests",
        kind: Kind::Counter,
        help: "Requests on the TCP port",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.server.http.requests);
        },
    },
    Family {
        name: "cascade_http_refused",
        kind: Kind::Counter,
        help: "Requests on the TCP port without a right to what they asked for",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.server.http.refused);
        },
    },
    Family {
        name: "cascade_http_turned_away",
        kind: Kind::Counter,
        help: "Connections to the TCP port that were one too many",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.server.http.turned_away);
        },
    },
    Family {
        name: "cascade_http_handshake_failures",
        kind: Kind::Counter,
        help: "TLS handshakes on the TCP port that failed",
        labels: &[],
        read: |status, samples| {
            samples.add(&[], status.server.http.handshake_failures);
        },
    },
    Family {
        name: "cascade_exported_spans",
        kind: Kind::Counter,
        help: "Spans that the trace collector took",
        labels: &[],
        read: |status, samples| {
            if let Some(traces) = &status.traces {
                samples.add(&[], traces.exported_spans);
            }
        },
    },
    Family {
        name: "cascade_lost_spans",
        kind: Kind::Counter,
        help: "Spans lost because the trace collector was slow, away or refused them",
        labels: &[],
        read: |status, samples| {
            if let Some(traces) = &status.traces {
                samples.add(&[], traces.lost_spans);
            }
        },
    },
];
