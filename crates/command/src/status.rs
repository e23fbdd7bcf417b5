//! `cascade status`: the status of a node as aligned text, with problems in red.

use std::fmt::Write;
use std::path::Path;

use cascade_block::ByteSize;
use cascade_node::status::{
    ClusterStatus, HealthState, NodeState, OperationStatus, PeerStatus, Status, TenantStatus,
};
use cascade_replay::figures::{duration, grouped, percent, span};
use clap::Args;
use serde_json::json;

use crate::connection::ConnectionArgs;
use crate::{EXIT_OK, Failure, Screen, write_json};

/// The node and the output format.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade status
      Hit rate, tiers, reads and writes, clients, and notes about problems.
  cascade status --json | jq '.tenants[0].tiers'
      The same status as JSON, as the node serves it at /status.json (docs/observability.md).
  cascade top
      The same, updated live.")]
pub(super) struct StatusArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

pub(super) fn run(args: &StatusArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let status: Status = args.connection.connect()?.request("status", &json!({}))?;
    if args.json {
        write_json(Path::new("-"), &status, screen)?;
    } else {
        screen.line(render(&status, screen))?;
    }
    Ok(EXIT_OK)
}

/// The status as `cascade status` prints it, without the last newline.
pub fn render(status: &Status, screen: &Screen) -> String {
    let mut page = StatusPage { text: String::new(), screen };
    page.node(status);
    for tenant in &status.tenants {
        page.tenant(tenant, status.tenants.len() > 1);
    }
    if let Some(cluster) = &status.cluster {
        page.cluster(cluster);
    }
    page.requests(&status.server.operations);
    page.clients(status);
    page.notes(status);
    page.text.trim_end().to_owned()
}

struct StatusPage<'a> {
    text: String,
    screen: &'a Screen,
}

/// The cells of one row of a table. The first column is left-aligned, the others right-aligned.
type Cells = Vec<String>;

impl StatusPage<'_> {
    fn line(&mut self, label: &str, text: &str) {
        self.write(format_args!("  {} {text}\n", self.screen.dim(&format!("{label:<9}"))));
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        self.text.write_fmt(text).expect("writing to a String does not fail");
    }

    fn table(&mut self, rows: &[Cells]) {
        let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (at, row) in rows.iter().enumerate() {
            let mut line = String::from("  ");
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let gap = " ".repeat(width - cell.chars().count());
                let (before, after) = if column == 0 { ("", gap.as_str()) } else { (&*gap, "") };
                line.extend([before, cell, after]);
                line.push_str("  ");
            }
            let line = line.trim_end();
            let line = if at == 0 { self.screen.dim(line) } else { line.to_owned() };
            self.write(format_args!("{line}\n"));
        }
    }

    fn node(&mut self, status: &Status) {
        let node = &status.node;
        let state = self.screen.verdict(node.state == NodeState::Serving, node.state.name());
        let name = self.screen.bold(&format!("Cascade {}", node.version));
        let uptime = span(node.uptime_s);
        self.write(format_args!("{name} {state}, up {uptime}, process {}\n", node.pid));
        self.line("socket", &node.socket);
        self.line("port", node.listen.as_deref().unwrap_or("none"));
        let memory = ByteSize(node.memory_bytes).rounded();
        let cpu = duration(node.cpu_s * 1e6);
        self.line("uses", &format!("{memory}, {} threads, {cpu} of CPU time", node.threads));
    }

    fn cluster(&mut self, cluster: &ClusterStatus) {
        self.write(format_args!("\n"));
        let head = ["node", "address", "state", "blocks", "has", "fetched", "bytes fetched"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        let row = |node: &PeerStatus| {
            vec![
                node.name.clone(),
                node.address.clone(),
                node.state.clone(),
                node.blocks.map_or_else(dash, grouped),
                node.bytes.map_or_else(dash, |bytes| ByteSize(bytes).rounded()),
                grouped(node.fetched_blocks),
                ByteSize(node.fetched_bytes).rounded(),
            ]
        };
        rows.extend(cluster.nodes.iter().map(row));
        self.table(&rows);
        for node in &cluster.nodes {
            if let Some(error) = &node.error {
                let text = self.screen.verdict(false, &format!("{}: {error}", node.name));
                self.write(format_args!("  {text}\n"));
            }
        }
    }

    fn tenant(&mut self, tenant: &TenantStatus, many: bool) {
        let heading = if many { format!("\ntenant {}", tenant.name) } else { String::new() };
        self.write(format_args!("{}\n", self.screen.bold(&heading)));
        let rate = &tenant.hit_rate;
        self.line(
            "hit rate",
            &format!(
                "{}: {} of {} blocks requested",
                rate.ratio.map_or_else(dash, percent),
                grouped(rate.matched_blocks),
                grouped(rate.requested_blocks),
            ),
        );
        let gets = &tenant.gets;
        self.line(
            "reads",
            &format!(
                "{} blocks: {} read ({}), {} missed, {} failed",
                grouped(gets.blocks),
                grouped(gets.hits),
                ByteSize(gets.bytes).rounded(),
                grouped(gets.misses),
                grouped(gets.failures),
            ),
        );
        let puts = &tenant.puts;
        self.line(
            "puts",
            &format!(
                "{} blocks: {} stored ({}), {} deduplicated, {} already present, {} declined, {} \
                 conflicts, {} failed",
                grouped(puts.blocks),
                grouped(puts.stored),
                ByteSize(puts.bytes).rounded(),
                grouped(puts.deduplicated),
                grouped(puts.present),
                grouped(puts.declined),
                grouped(puts.conflicts),
                grouped(puts.failures),
            ),
        );
        self.movement(tenant);
        self.tiers(tenant);
        self.shadows(tenant);
        self.hot_prefixes(tenant);
    }

    fn movement(&mut self, tenant: &TenantStatus) {
        let (mover, evictions) = (&tenant.mover, &tenant.evictions);
        self.line(
            "moved",
            &format!(
                "{} demoted, {} promoted, {} pending",
                ByteSize(mover.demoted_bytes).rounded(),
                ByteSize(mover.promoted_bytes).rounded(),
                ByteSize(mover.pending_bytes).rounded(),
            ),
        );
        self.line(
            "evicted",
            &format!(
                "{} blocks from DRAM, {} of them lost; {} from lower tiers",
                grouped(evictions.blocks),
                grouped(evictions.lost_blocks),
                grouped(evictions.reclaimed_blocks),
            ),
        );
        if let Some(warm) = &tenant.warm_restart {
            let blocks = grouped(warm.recovered_blocks);
            let bytes = ByteSize(warm.recovered_bytes).rounded();
            let took = duration(warm.recover_s * 1e6);
            self.line("restart", &format!("{blocks} blocks ({bytes}) recovered in {took}"));
        }
        if tenant.damaged_blocks > 0 {
            let damaged = format!("{} blocks, answered as misses", grouped(tenant.damaged_blocks));
            let damaged = self.screen.verdict(false, &damaged);
            self.line("damaged", &damaged);
        }
    }

    fn tiers(&mut self, tenant: &TenantStatus) {
        let heads =
            ["tier", "state", "used", "of", "full", "blocks", "matched", "read", "bytes read"];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        for tier in &tenant.tiers {
            let state = tier.health.as_ref().map_or("healthy", |health| health.state.name());
            rows.push(vec![
                tier.name.clone(),
                state.to_owned(),
                ByteSize(tier.used_bytes).rounded(),
                ByteSize(tier.capacity_bytes).rounded(),
                share(tier.used_bytes, tier.capacity_bytes).map_or_else(dash, percent),
                tier.blocks.map_or_else(dash, grouped),
                grouped(tier.matched_blocks),
                grouped(tier.hits),
                ByteSize(tier.hit_bytes).rounded(),
            ]);
        }
        self.table(&rows);
        for tier in &tenant.tiers {
            let health = tier.health.as_ref();
            let Some(health) = health.filter(|it| it.state != HealthState::Healthy) else {
                continue;
            };
            let error = health.last_error.as_deref().unwrap_or("no error was reported");
            let open = match (health.reads, health.writes) {
                (HealthState::Healthy, HealthState::Open | HealthState::Probing) => {
                    "circuit open for writes"
                }
                (HealthState::Open | HealthState::Probing, HealthState::Healthy) => {
                    "circuit open for reads"
                }
                // Both circuits are open, or the node reports only one state for both.
                _ => "circuit open",
            };
            let what = format!("{open} for {}: {error}", span(health.since_s));
            let what = self.screen.verdict(false, &what);
            self.line(&tier.name, &what);
        }
    }

    fn shadows(&mut self, tenant: &TenantStatus) {
        if tenant.shadows.is_empty() {
            return;
        }
        let mut rows =
            vec![["simulated", "capacity", "predicted hit rate"].map(str::to_owned).to_vec()];
        for shadow in &tenant.shadows {
            rows.push(vec![
                format!("{} at {} %", shadow.tier, shadow.capacity_percent),
                ByteSize(shadow.capacity_bytes).rounded(),
                percent(shadow.predicted_hit_rate),
            ]);
        }
        self.table(&rows);
    }

    fn hot_prefixes(&mut self, tenant: &TenantStatus) {
        if tenant.hot_prefixes.is_empty() {
            return;
        }
        let heads = ["hot prefix", "blocks", "requests", "resident", "tiers"];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        for prefix in &tenant.hot_prefixes {
            rows.push(vec![
                prefix.key.get(..16).unwrap_or(&prefix.key).to_owned(),
                grouped(prefix.depth_blocks),
                grouped(prefix.requests),
                ByteSize(prefix.resident_bytes).rounded(),
                prefix.tiers.join(" "),
            ]);
        }
        self.table(&rows);
    }

    fn requests(&mut self, operations: &[OperationStatus]) {
        let heads = ["operation", "requests", "failed", "p50", "p99", "blocks per request"];
        let mut rows = vec![heads.map(str::to_owned).to_vec()];
        let within = |bound: Option<f64>| match bound {
            None => dash(),
            Some(seconds) if seconds.is_infinite() => "over 17 s".to_owned(),
            Some(seconds) => duration(seconds * 1e6),
        };
        for operation in operations.iter().filter(|one| one.duration_s.count() > 0) {
            rows.push(vec![
                operation.operation.clone(),
                grouped(operation.duration_s.count()),
                grouped(operation.failures),
                within(operation.duration_s.quantile(0.5)),
                within(operation.duration_s.quantile(0.99)),
                operation.blocks.mean().map_or_else(dash, |mean| format!("{mean:.1}")),
            ]);
        }
        if rows.len() > 1 {
            self.text.push('\n');
            self.table(&rows);
        }
    }

    fn clients(&mut self, status: &Status) {
        let clients = &status.clients;
        self.text.push('\n');
        let held = ByteSize(clients.leased_bytes).rounded();
        let connected = grouped(clients.connected);
        let oldest = clients.oldest_lease_s;
        let oldest = oldest.map_or_else(String::new, |age| format!(", oldest lease {}", span(age)));
        let text = format!("{connected} connected, {held} leased{oldest}");
        self.line("clients", &text);
        if clients.stopped + clients.silent > 0 {
            let idle = format!("{} stopped, {} idle with leases", clients.stopped, clients.silent);
            let idle = self.screen.verdict(false, &idle);
            self.line("idle", &idle);
        }
        for client in &clients.list {
            let held = ByteSize(client.leased_bytes).rounded();
            let state = if client.is_stopped { ", stopped" } else { "" };
            let text = format!("process {} ({}) holds {held}{state}", client.pid, client.name);
            self.line("", &text);
        }
    }

    /// How tiers are encrypted, and the notes about them.
    fn notes(&mut self, status: &Status) {
        for tier in status.tenants.iter().flat_map(|tenant| &tenant.tiers) {
            if let Some(encryption) = &tier.encryption {
                self.line("encrypted", &format!("tier {}: {encryption}", tier.name));
            }
        }
        let of_tenants = status.tenants.iter().flat_map(|tenant| {
            let of_tiers = tenant.tiers.iter().flat_map(|tier| &tier.notes);
            tenant.notes.iter().chain(of_tiers)
        });
        for note in status.notes.iter().chain(of_tenants) {
            self.line("note", note);
        }
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

fn dash() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cascade_node::status::{HealthStatus, HitRate, ShadowStatus, TierStatus};

    fn plain() -> Screen {
        let mut screen = Screen::of_process();
        screen.is_coloured = false;
        screen
    }

    fn busy() -> Status {
        let mut status = Status::default();
        status.node.version = "1.2.3".to_owned();
        status.node.socket = "/run/cascade.sock".to_owned();
        status.node.state = NodeState::Serving;
        let mut tenant = TenantStatus { name: "default".to_owned(), ..TenantStatus::default() };
        tenant.hit_rate = HitRate::of(10_000, 500);
        tenant.gets.blocks = 2000;
        tenant.gets.hits = 1500;
        tenant.gets.misses = 500;
        tenant.tiers = vec![TierStatus {
            name: "files".to_owned(),
            capacity_bytes: 4 << 30,
            used_bytes: 1 << 30,
            hits: 1500,
            health: Some(HealthStatus {
                state: HealthState::Open,
                since_s: 30.0,
                last_error: Some("input/output error".to_owned()),
                ..HealthStatus::default()
            }),
            notes: vec!["io_uring is not allowed here".to_owned()],
            ..TierStatus::default()
        }];
        status.tenants = vec![tenant];
        status
    }

    #[test]
    fn the_page_shows_the_hit_rate_the_reads_and_the_open_circuit() {
        let text = render(&busy(), &plain());
        for part in [
            "Cascade 1.2.3 serving",
            "5.0 %: 500 of 10,000 blocks requested",
            "2,000 blocks: 1,500 read",
            "500 missed",
            "1.0 GiB  4.0 GiB  25.0 %",
            "circuit open for 30 seconds: input/output error",
            "io_uring is not allowed here",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
        assert!(text.lines().all(|line| line.trim_end() == line), "no spaces at ends:\n{text}");
    }

    /// The page had a table with other words than the command prints.
    #[test]
    fn the_guide_to_sizing_shows_the_table_that_is_printed() {
        let mut status = busy();
        let shadow = |percent: u32, predicted_hit_rate| ShadowStatus {
            tier: "dram".to_owned(),
            capacity_percent: percent,
            capacity_bytes: (64 << 30) / 100 * u64::from(percent),
            predicted_hit_rate,
        };
        status.tenants[0].shadows = vec![shadow(100, 0.412), shadow(150, 0.529), shadow(200, 0.55)];
        let text = render(&status, &plain());
        let begin = text.find("  simulated").unwrap();
        let table: Vec<_> = text[begin..].lines().take(4).collect();
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/sizing.md");
        let page = std::fs::read_to_string(page).unwrap();
        let table = format!("```\n{}\n```", table.join("\n"));
        assert!(page.contains(&table), "docs/sizing.md lacks:\n{table}");
    }

    #[test]
    fn a_status_is_equal_after_a_round_trip_through_json() {
        let status = busy();
        let json = serde_json::to_string(&status).unwrap();
        assert_eq!(serde_json::from_str::<Status>(&json).unwrap(), status);
    }
}
