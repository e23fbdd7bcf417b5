//! The diagram of tiers: their use of space, and the data flow between them.

use maud::{Markup, html};

use crate::http::page::format::{bytes, count, current_rate, per_second, percent, tier_class};
use crate::samples::{Flow, Series};
use crate::status::{HealthState, Status, TenantStatus, TierStatus};

const WIDTH: usize = 1000;
const HEIGHT: usize = 170;
const BOX_WIDTH: usize = 210;
const BOX_TOP: usize = 20;
const BOX_HEIGHT: usize = 130;

pub(super) fn drawing(status: &Status, series: &Series) -> Markup {
    let tiers = TenantStatus::total(&status.tenants).tiers;
    // The first box is for the clients. The boxes of the tiers share the remaining width.
    let step = (WIDTH - BOX_WIDTH) / tiers.len().max(1);
    let width = BOX_WIDTH.min(step * 2 / 3);
    html! {
        svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" class="flows"
            aria-label="Tiers from fast to slow and the data flow between them" {
            defs {
                marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"
                    markerHeight="7" orient="auto-start-reverse" {
                    path d="M0 0 L8 4 L0 8 Z" class="tip" {}
                }
            }
            (clients(status, width))
            @for (at, tier) in tiers.iter().enumerate() {
                @let left = (at + 1) * step;
                (tier_box(tier, left, width))
                @let (down, up) = flows_of(at);
                (arrow(left + width - step, left, 62, current_rate(series, down), down, true))
                (arrow(left + width - step, left, 122, current_rate(series, up), up, false))
            }
        }
    }
}

/// The flows between a tier and the box to its left: down to the tier, and up from it.
fn flows_of(at: usize) -> (Flow, Flow) {
    if at == 0 { (Flow::Put, Flow::Read) } else { (Flow::Demoted, Flow::Promoted) }
}

fn clients(status: &Status, width: usize) -> Markup {
    let middle = width / 2;
    html! {
        rect.box x="0.5" y=(BOX_TOP) width=(width) height=(BOX_HEIGHT) rx="8" {}
        text.name x=(middle) y="60" text-anchor="middle" { "clients" }
        text.soft x=(middle) y="88" text-anchor="middle" {
            (count(status.clients.connected)) " connected"
        }
        text.soft x=(middle) y="112" text-anchor="middle" {
            (count(status.clients.leases)) " leases"
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "the length of a bar")]
fn tier_box(tier: &TierStatus, left: usize, width: usize) -> Markup {
    let share = tier.used_bytes as f64 / tier.capacity_bytes.max(1) as f64;
    let bar_width = width - 32;
    let bar = format!("{:.1}", bar_width as f64 * share.clamp(0.0, 1.0));
    let health = tier.health.as_ref().map(|health| health.state);
    let is_open = health.is_some_and(|state| state != HealthState::Healthy);
    let class = if is_open { "box bad" } else { "box" };
    let text = left + 16;
    html! {
        rect class=(class) x=(left) y=(BOX_TOP) width=(width - 1) height=(BOX_HEIGHT) rx="8" {}
        text.name x=(text) y="50" { (tier.name) }
        text.soft x=(left + width - 16) y="50" text-anchor="end" { (percent(share)) }
        rect.groove x=(text) y="62" width=(bar_width) height="14" rx="3" {}
        rect class=(tier_class(&tier.name)) x=(text) y="62" width=(bar) height="14" rx="3" {}
        text.soft x=(text) y="102" {
            (bytes(tier.used_bytes)) " of " (bytes(tier.capacity_bytes))
        }
        text.soft x=(text) y="126" {
            @if is_open { "circuit open" }
            @else if let Some(blocks) = tier.blocks { (count(blocks)) " blocks" }
        }
    }
}

fn arrow(
    from: usize,
    to: usize,
    height: usize,
    rate: Option<f64>,
    flow: Flow,
    is_down: bool,
) -> Markup {
    let name = match flow {
        Flow::Read => "read",
        Flow::Put => "put",
        Flow::Demoted => "demoted",
        Flow::Promoted => "promoted",
        Flow::Evicted => "evicted",
    };
    let is_active = rate.is_some_and(|rate| rate >= 1.0);
    let class = if is_active { "arrow active" } else { "arrow" };
    let (start, end) = if is_down { (from + 8, to - 8) } else { (to - 8, from + 8) };
    let middle = usize::midpoint(from, to);
    let amount = rate.filter(|_| is_active).map_or_else(|| "–".to_owned(), per_second);
    html! {
        line class=(class) x1=(start) x2=(end) y1=(height) y2=(height) marker-end="url(#tip)" {}
        text.rate x=(middle) y=(height - 10) text-anchor="middle" { (amount) }
        text.soft x=(middle) y=(height + 18) text-anchor="middle" { (name) }
    }
}
