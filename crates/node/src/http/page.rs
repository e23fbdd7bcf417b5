//! The status page: one page without external resources. Its script reloads the main part.

mod flows;
mod format;
mod tables;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::http::plot;
use crate::samples::{Flow, Series};
use crate::status::{ALL_TENANTS, HealthState, HitRate, NodeState, Status, StatusView};

pub(super) use format::tier_class;
use format::{bytes, count, percent, rate, time};

/// The whole page.
pub(super) fn page(status: &Status, series: &Series, nonce: &str) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Cascade" }
                link rel="icon" href="data:,";
                style nonce=(nonce) { (PreEscaped(include_str!("page/page.css"))) }
                noscript { meta http-equiv="refresh" content="5"; }
            }
            body {
                main id="live" { (body(status, series)) }
                footer {
                    a href="status.json" { "status.json" }
                    a href="metrics" { "metrics" }
                    a href="healthz" { "healthz" }
                    a href="readyz" { "readyz" }
                    span id="lost" hidden {
                        "The node does not respond. This is its last known status."
                    }
                }
                script nonce=(nonce) { (PreEscaped(include_str!("page/page.js"))) }
            }
        }
    }
}

/// The part of the page that changes.
pub(super) fn body(status: &Status, series: &Series) -> Markup {
    html! {
        (head(status))
        (scope(status))
        (alarms(status))
        (tiles(status, series))
        figure.wide {
            h2 { "Tiers and data flow" }
            div.flows-scroll { (flows::drawing(status, series)) }
        }
        div.plots {
            figure {
                h2 { "Hit rate by tier" }
                (hit_legend(series))
                (plot::hits(series))
            }
            figure {
                h2 { "Bytes per second" }
                ul.legend {
                    @for (flow, name) in plot::LINES {
                        li { i class=(plot::flow_class(*flow)) {} (name) }
                    }
                }
                (plot::rates(series))
            }
        }
        (tables::all(status))
    }
}

fn head(status: &Status) -> Markup {
    let node = &status.node;
    let class = match node.state {
        NodeState::Serving => "pill good",
        NodeState::Starting | NodeState::Draining => "pill wait",
    };
    html! {
        header {
            h1 { "Cascade " span class=(class) data-path="node.state" { (node.state.name()) } }
            p {
                "version " b data-path="node.version" { (node.version) }
                ", process " b data-path="node.pid" { (node.pid) }
                ", up " b { (time(node.uptime_s)) }
                ", socket " b data-path="node.socket" { (node.socket) }
                @if let Some(listen) = &node.listen {
                    ", port " b data-path="node.listen" { (listen) }
                }
            }
        }
    }
}

/// The scope of the page, if it is not the whole node.
fn scope(status: &Status) -> Markup {
    html! {
        @match &status.view {
            StatusView::All => {}
            StatusView::Tenant(name) => { p.scope { "Tenant " b { (name) } "." } }
            StatusView::Totals => {
                p.scope {
                    "Totals of all tenants. For tenants, clients and prefixes, use a token or the \
                     Unix socket: " code { "cascade status" } " or "
                    code {
                        "curl --unix-socket " (status.node.socket) ".http localhost/status.json"
                    }
                }
            }
        }
    }
}

fn alarms(status: &Status) -> Markup {
    let tiers = status.tenants.iter().flat_map(|tenant| {
        tenant.tiers.iter().filter_map(move |tier| Some((tenant, tier, tier.health.as_ref()?)))
    });
    html! {
        @for (tenant, tier, health) in tiers {
            @if health.state != HealthState::Healthy {
                p.alarm {
                    b { "The circuit of tier " (tier.name) " of " (owner(&tenant.name)) " is open" }
                    " for " (time(health.since_s)) ". Its blocks are misses until a probe \
                    succeeds. "
                    @if let Some(error) = &health.last_error { "Last error: " (error) }
                }
            }
        }
        @for tenant in status.tenants.iter().filter(|tenant| tenant.damaged_blocks > 0) {
            p.alarm {
                b { (count(tenant.damaged_blocks)) " damaged blocks" } " of " (owner(&tenant.name))
                " were answered as misses. Check the disk of the file tier."
            }
        }
        @if status.clients.stopped + status.clients.silent > 0 {
            p.alarm {
                b { (status.clients.stopped) " stopped and " (status.clients.silent) " idle" }
                " clients hold memory. See the list of clients."
            }
        }
    }
}

/// `tenant NAME`, or `all tenants`.
fn owner(tenant: &str) -> String {
    if tenant == ALL_TENANTS { tenant.to_owned() } else { format!("tenant {tenant}") }
}

/// A tile with one important figure.
fn tile(value: &str, label: &str) -> Markup {
    html! { div.tile { b { (value) } span { (label) } } }
}

fn tiles(status: &Status, series: &Series) -> Markup {
    let since_start = HitRate::sum(status.tenants.iter().map(|tenant| &tenant.hit_rate)).ratio;
    let recent = (series.requested >= 1.0).then(|| series.matched / series.requested);
    let (hit_rate, label) = match (recent, since_start) {
        (Some(recent), _) => (percent(recent), format!("hit rate, last {}", time(series.span_s))),
        (None, Some(rate)) => (percent(rate), "hit rate since start".to_owned()),
        (None, None) => ("–".to_owned(), "hit rate (no requests yet)".to_owned()),
    };
    let load = status.server.operations.iter().find(|operation| operation.operation == "view");
    let load = load.and_then(|load| load.duration_s.quantile(0.99));
    let used: u64 = status.tenants.iter().map(|tenant| tenant.pool.reserved_bytes).sum();
    let pools: u64 = status.tenants.iter().map(|tenant| tenant.pool.capacity_bytes).sum();
    let clients = &status.clients;
    html! {
        div.tiles {
            (tile(&hit_rate, &label))
            (tile(&rate(series, Flow::Read), "read by clients"))
            (tile(&rate(series, Flow::Put), "put by clients"))
            @if let Some(load) = load { (tile(&time(load), "load latency, p99")) }
            (tile(&bytes(used), &format!("of {} DRAM used", bytes(pools))))
            (tile(
                &count(clients.connected),
                &format!("clients, {} leased", bytes(clients.leased_bytes)),
            ))
        }
    }
}

fn hit_legend(series: &Series) -> Markup {
    html! {
        ul.legend {
            @for tier in &series.tiers { li { i class=(tier_class(tier)) {} (tier) } }
            li { i.c-miss {} "missed" }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{
        ClientStatus, HealthStatus, HotPrefix, ShadowStatus, TenantStatus, TierStatus,
    };

    /// A status with values in every part.
    fn full_status() -> Status {
        let mut status = Status::default();
        let mut tenant = TenantStatus { name: "research".to_owned(), ..TenantStatus::default() };
        tenant.tiers = vec![TierStatus {
            name: "files".to_owned(),
            health: Some(HealthStatus {
                state: HealthState::Open,
                last_error: Some("input/output error".to_owned()),
                ..HealthStatus::default()
            }),
            ..TierStatus::default()
        }];
        tenant.damaged_blocks = 3;
        tenant.shadows = vec![ShadowStatus {
            tier: "dram".to_owned(),
            capacity_percent: 150,
            capacity_bytes: 12 << 30,
            predicted_hit_rate: 0.625,
        }];
        tenant.hot_prefixes = vec![HotPrefix {
            key: "ab".repeat(32),
            depth_blocks: 17,
            requests: 420,
            resident_bytes: 1 << 20,
            tiers: vec!["dram".to_owned(), "files".to_owned()],
        }];
        status.tenants = vec![TenantStatus::default(), tenant];
        status.clients.stopped = 1;
        status.clients.list = vec![ClientStatus {
            pid: 4711,
            name: "<script>alert(1)</script>".to_owned(),
            is_stopped: true,
            ..ClientStatus::default()
        }];
        status.notes = vec!["a note & more".to_owned()];
        status
    }

    #[test]
    fn the_page_shows_each_part_of_a_status() {
        let page = page(&full_status(), &Series::default(), "0").into_string();
        for part in [
            "Predicted hit rate at other capacities",
            "150 %",
            "62.5 %",
            "Hot prefixes",
            "abababababababab",
            "420",
            "Clients by memory held",
            "4711",
            "The circuit of tier files of tenant research is open",
            "input/output error",
            "3 damaged blocks",
            "1 stopped and 0 idle",
            "node: a note &amp; more",
            "research",
        ] {
            assert!(page.contains(part), "{part:?} is missing");
        }
    }

    /// Misses were counted as read.
    #[test]
    fn misses_are_not_blocks_read() {
        let mut status = Status::default();
        let mut tenant = TenantStatus::default();
        (tenant.gets.blocks, tenant.gets.hits, tenant.gets.misses) = (2000, 1500, 500);
        status.tenants = vec![tenant];
        let page = page(&status, &Series::default(), "0").into_string();
        assert!(page.contains(">1,500</b> read<"), "{page}");
        assert!(page.contains(">500</b> read misses<"), "{page}");
        assert!(!page.contains("2,000"), "{page}");
    }

    #[test]
    fn time_without_samples_is_marked() {
        let mut series = Series { span_s: 600.0, ..Series::default() };
        series.slices = vec![crate::samples::TimeSlice::default(); 60];
        for slice in &mut series.slices[40..] {
            slice.sampled_s = 10.0;
            slice.requested = 1.0;
        }
        for plot in [plot::hits(&series), plot::rates(&series)] {
            let plot = plot.into_string();
            assert_eq!(plot.matches("class=\"gap\"").count(), 1, "{plot}");
            assert!(plot.contains("no samples"), "{plot}");
        }
        series.slices.iter_mut().for_each(|slice| slice.sampled_s = 10.0);
        assert!(!plot::hits(&series).into_string().contains("no samples"));
    }

    /// At the width of a phone, columns were cut without a sign that there are more.
    #[test]
    fn every_table_is_in_a_part_that_scrolls() {
        let page = page(&full_status(), &Series::default(), "0").into_string();
        let parts: Vec<&str> = page.split("<table").collect();
        assert!(parts.len() > 3);
        for before in &parts[..parts.len() - 1] {
            let (_, opened) = before.rsplit_once("<div class=\"scroll\" tabindex=\"0\"").unwrap();
            assert!(!opened.contains("</div>"), "{opened}");
        }
        let style = include_str!("page/page.css");
        assert!(style.contains("overflow-x: auto") && style.contains("background-attachment"));
    }

    #[test]
    fn html_in_the_name_of_a_client_is_escaped() {
        let page = page(&full_status(), &Series::default(), "0").into_string();
        assert!(page.contains("&lt;script&gt;alert(1)"));
        assert!(!page.contains("<script>"));
    }
}
