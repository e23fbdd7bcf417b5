//! The tables of the page. The attribute `data-path` of a cell is the path of its value in the
//! status.

use maud::{Markup, html};

use crate::http::page::format::{bytes, count, percent, tier_class, time};
use crate::status::{HealthState, Status, TenantStatus, TierStatus};

pub(super) fn all(status: &Status) -> Markup {
    html! {
        (tiers(status))
        (requests(status))
        (shadows(status))
        (hot_prefixes(status))
        (clients(status))
        (notes(status))
    }
}

/// A cell with a value of the status and its text.
fn cell(path: &str, value: u64, text: &str) -> Markup {
    html! { td.number data-path=(path) data-value=(value) { (text) } }
}

fn section(title: &str, body: &Markup) -> Markup {
    html! {
        section {
            h2 { (title) }
            div.scroll tabindex="0" role="region" aria-label=(title) { (body) }
        }
    }
}

fn tiers(status: &Status) -> Markup {
    let many = status.tenants.len() > 1;
    let head = html! {
        tr {
            @if many { th { "tenant" } }
            th { "tier" } th { "state" } th.number { "used" } th.number { "capacity" }
            th.number { "used %" }
            th.number { "blocks" } th.number { "blocks matched" } th.number { "blocks read" }
            th.number { "bytes read" }
            th.number { "blocks damaged" }
        }
    };
    let body = html! {
        table {
            (head)
            @for (at, tenant) in status.tenants.iter().enumerate() {
                @for (tier_at, tier) in tenant.tiers.iter().enumerate() {
                    tr {
                        @if many { td { (tenant.name) } }
                        (tier_row(&format!("tenants.{at}.tiers.{tier_at}"), tier))
                    }
                }
            }
        }
        @for (at, tenant) in status.tenants.iter().enumerate() { (sums(at, tenant, many)) }
    };
    section("Tiers", &body)
}

#[expect(clippy::cast_precision_loss, reason = "a share for display")]
fn tier_row(path: &str, tier: &TierStatus) -> Markup {
    let used_share = tier.used_bytes as f64 / tier.capacity_bytes.max(1) as f64;
    let (class, state) = match tier.health.as_ref().map(|health| health.state) {
        None | Some(HealthState::Healthy) => ("good", "healthy"),
        Some(HealthState::Open) => ("bad", "circuit open"),
        Some(HealthState::Probing) => ("wait", "probing"),
    };
    let field = |name: &str| format!("{path}.{name}");
    html! {
        td { i class=(tier_class(&tier.name)) {} (tier.name) }
        td class=(class) { (state) }
        (cell(&field("used_bytes"), tier.used_bytes, &bytes(tier.used_bytes)))
        (cell(&field("capacity_bytes"), tier.capacity_bytes, &bytes(tier.capacity_bytes)))
        td.number { (percent(used_share)) }
        @match tier.blocks {
            Some(blocks) => (cell(&field("blocks"), blocks, &count(blocks))),
            None => td.number { "–" },
        }
        (cell(&field("matched_blocks"), tier.matched_blocks, &count(tier.matched_blocks)))
        (cell(&field("hits"), tier.hits, &count(tier.hits)))
        (cell(&field("hit_bytes"), tier.hit_bytes, &bytes(tier.hit_bytes)))
        (cell(&field("damaged_blocks"), tier.damaged_blocks, &count(tier.damaged_blocks)))
    }
}

/// One line for each tenant: the counts of its requests by outcome.
fn sums(at: usize, tenant: &TenantStatus, many: bool) -> Markup {
    let part = |field: &str, value: u64, label: &str| {
        html! {
            span.part {
                b data-path={ "tenants." (at) "." (field) } data-value=(value) { (count(value)) }
                " " (label)
            }
        }
    };
    let (hit_rate, gets, puts) = (&tenant.hit_rate, &tenant.gets, &tenant.puts);
    html! {
        p.sums {
            @if many { span.part { (tenant.name) ":" } }
            @if let Some(ratio) = hit_rate.ratio {
                span.part {
                    b data-path={ "tenants." (at) ".hit_rate.ratio" }
                        data-value=(format!("{ratio:?}")) { (percent(ratio)) }
                    " hit rate"
                }
            }
            (part("hit_rate.requested_blocks", hit_rate.requested_blocks, "blocks requested"))
            (part("hit_rate.matched_blocks", hit_rate.matched_blocks, "matched"))
            (part("gets.hits", gets.hits, "read"))
            (part("gets.misses", gets.misses, "read misses"))
            (part("gets.failures", gets.failures, "read failures"))
            (part("puts.blocks", puts.blocks, "put"))
            (part("puts.stored", puts.stored, "stored"))
            (part("puts.deduplicated", puts.deduplicated, "deduplicated"))
            (part("evictions.blocks", tenant.evictions.blocks, "evicted"))
            (part("evictions.lost_blocks", tenant.evictions.lost_blocks, "lost"))
            @if let Some(warm) = &tenant.warm_restart {
                (part("warm_restart.recovered_blocks", warm.recovered_blocks, "recovered at start"))
            }
        }
    }
}

fn requests(status: &Status) -> Markup {
    let was_used = |operation: &&crate::status::OperationStatus| operation.duration_s.count() > 0;
    let mut operations = status.server.operations.iter().filter(was_used).peekable();
    if operations.peek().is_none() {
        return html! {};
    }
    let quantile = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), time);
    let body = html! {
        table {
            tr {
                th { "operation" } th.number { "requests" } th.number { "failed" }
                th.number { "p50" } th.number { "p99" }
                th.number { "blocks per request" }
            }
            @for operation in operations {
                tr {
                    td { (operation.operation) }
                    td.number { (count(operation.duration_s.count())) }
                    td.number { (count(operation.failures)) }
                    td.number { (quantile(operation.duration_s.quantile(0.5))) }
                    td.number { (quantile(operation.duration_s.quantile(0.99))) }
                    td.number {
                        @match operation.blocks.mean() {
                            Some(mean) => (format!("{mean:.1}")),
                            None => "–",
                        }
                    }
                }
            }
        }
    };
    section("Requests", &body)
}

fn shadows(status: &Status) -> Markup {
    if status.tenants.iter().all(|tenant| tenant.shadows.is_empty()) {
        return html! {};
    }
    let body = html! {
        table {
            tr {
                th { "tenant" } th { "tier" } th.number { "of capacity" } th.number { "size" }
                th.number { "hit rate of lookups" }
            }
            @for tenant in &status.tenants {
                @for shadow in &tenant.shadows {
                    tr {
                        td { (tenant.name) }
                        td { i class=(tier_class(&shadow.tier)) {} (shadow.tier) }
                        td.number { (shadow.capacity_percent) " %" }
                        td.number { (bytes(shadow.capacity_bytes)) }
                        td.number { (percent(shadow.predicted_hit_rate)) }
                    }
                }
            }
        }
    };
    section("Predicted hit rate at other capacities", &body)
}

fn hot_prefixes(status: &Status) -> Markup {
    if status.tenants.iter().all(|tenant| tenant.hot_prefixes.is_empty()) {
        return html! {};
    }
    let body = html! {
        table {
            tr {
                th { "tenant" } th { "last block" } th.number { "blocks" }
                th.number { "recent requests" } th.number { "resident" } th { "tiers" }
            }
            @for tenant in &status.tenants {
                @for prefix in &tenant.hot_prefixes {
                    tr {
                        td { (tenant.name) }
                        @let short = prefix.key.get(..16).unwrap_or(&prefix.key);
                        td { code title=(prefix.key) { (short) } }
                        td.number { (count(prefix.depth_blocks)) }
                        td.number { (count(prefix.requests)) }
                        td.number { (bytes(prefix.resident_bytes)) }
                        td { (prefix.tiers.join(", ")) }
                    }
                }
            }
        }
    };
    section("Hot prefixes", &body)
}

fn clients(status: &Status) -> Markup {
    if status.clients.list.is_empty() {
        return html! {};
    }
    let body = html! {
        table {
            tr {
                th { "process" } th { "program" } th { "tenant" } th.number { "leases" }
                th.number { "leased" } th.number { "reserved" } th.number { "oldest lease" }
                th.number { "idle for" } th { "state" }
            }
            @for client in &status.clients.list {
                tr {
                    td { (client.pid) }
                    td { (client.name) }
                    td { (client.tenant) }
                    td.number { (count(client.leases)) }
                    td.number { (bytes(client.leased_bytes)) }
                    td.number { (bytes(client.reserved_bytes)) }
                    td.number { (client.oldest_lease_s.map_or_else(|| "–".to_owned(), time)) }
                    td.number { (time(client.silent_s)) }
                    @if client.is_stopped { td.bad { "stopped" } } @else { td { "running" } }
                }
            }
        }
    };
    section("Clients by memory held", &body)
}

fn notes(status: &Status) -> Markup {
    let mut notes: Vec<(String, &String)> =
        status.notes.iter().map(|note| ("node".to_owned(), note)).collect();
    for tenant in &status.tenants {
        notes.extend(tenant.notes.iter().map(|note| (format!("tenant {}", tenant.name), note)));
        for tier in &tenant.tiers {
            let owner = format!("{} of tenant {}", tier.name, tenant.name);
            notes.extend(tier.notes.iter().map(|note| (owner.clone(), note)));
        }
    }
    if notes.is_empty() {
        return html! {};
    }
    section("Notes", &html! { ul { @for (owner, note) in notes { li { (owner) ": " (note) } } } })
}
