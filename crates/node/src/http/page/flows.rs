//! The drawing of tiers, how full they are, and what moves between them.

use maud::{Markup, html};

use crate::http::page::shown::{bytes, count, per_second, percent, rate_now, tier_hue};
use crate::samples::{Flow, Series};
use crate::status::{HealthState, Status};

const WIDTH: usize = 1000;
const HEIGHT: usize = 170;
const BOX_WIDTH: usize = 210;
const BOX_TOP: usize = 20;
const BOX_HEIGHT: usize = 130;

/// One tier of all tenants together.
#[derive(Debug, Default)]
struct Place {
    name: String,
    used_bytes: u64,
    capacity_bytes: u64,
    blocks: Option<u64>,
    is_open: bool,
}

pub(super) fn drawing(status: &Status, series: &Series) -> Markup {
    let places = places(status);
    // The clients' box is one more; what is left over is split between the boxes.
    let step = (WIDTH - BOX_WIDTH) / places.len().max(1);
    let width = BOX_WIDTH.min(step * 2 / 3);
    html! {
        svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" class="flows"
            aria-label="Tiers from fast to slow and the bytes that move between them" {
            defs {
                marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"
                    markerHeight="7" orient="auto-start-reverse" {
                    path d="M0 0 L8 4 L0 8 Z" class="tip" {}
                }
            }
            (clients(status, width))
            @for (at, place) in places.iter().enumerate() {
                @let left = (at + 1) * step;
                (tier(place, left, width))
                @let (forth, back) = between(at);
                (arrow(left + width - step, left, 62, rate_now(series, forth), forth, true))
                (arrow(left + width - step, left, 122, rate_now(series, back), back, false))
            }
        }
    }
}

/// What flows toward a tier and away from it.
fn between(at: usize) -> (Flow, Flow) {
    if at == 0 { (Flow::Put, Flow::Got) } else { (Flow::Demoted, Flow::Promoted) }
}

fn places(status: &Status) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::new();
    for tier in status.tenants.iter().flat_map(|tenant| &tenant.tiers) {
        let known = places.iter().position(|place| place.name == tier.name);
        let at = known.unwrap_or_else(|| {
            places.push(Place { name: tier.name.clone(), ..Place::default() });
            places.len() - 1
        });
        let place = &mut places[at];
        place.used_bytes += tier.used_bytes;
        place.capacity_bytes += tier.capacity_bytes;
        place.blocks = tier.blocks.map(|blocks| place.blocks.unwrap_or(0) + blocks);
        let health = tier.health.as_ref().map(|health| health.state);
        place.is_open |= health.is_some_and(|state| state != HealthState::Healthy);
    }
    places
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

#[expect(clippy::cast_precision_loss, reason = "a bar's length")]
fn tier(place: &Place, left: usize, width: usize) -> Markup {
    let share = place.used_bytes as f64 / place.capacity_bytes.max(1) as f64;
    let bar_width = width - 32;
    let bar = format!("{:.1}", bar_width as f64 * share.clamp(0.0, 1.0));
    let class = if place.is_open { "box bad" } else { "box" };
    let text = left + 16;
    html! {
        rect class=(class) x=(left) y=(BOX_TOP) width=(width - 1) height=(BOX_HEIGHT) rx="8" {}
        text.name x=(text) y="50" { (place.name) }
        text.soft x=(left + width - 16) y="50" text-anchor="end" { (percent(share)) }
        rect.groove x=(text) y="62" width=(bar_width) height="14" rx="3" {}
        rect class=(tier_hue(&place.name)) x=(text) y="62" width=(bar) height="14" rx="3" {}
        text.soft x=(text) y="102" {
            (bytes(place.used_bytes)) " of " (bytes(place.capacity_bytes))
        }
        text.soft x=(text) y="126" {
            @if place.is_open { "circuit open" }
            @else if let Some(blocks) = place.blocks { (count(blocks)) " blocks" }
        }
    }
}

fn arrow(
    from: usize,
    to: usize,
    height: usize,
    rate: Option<f64>,
    flow: Flow,
    forth: bool,
) -> Markup {
    let name = match flow {
        Flow::Got => "read",
        Flow::Put => "put",
        Flow::Demoted => "demoted",
        Flow::Promoted => "promoted",
        Flow::Evicted => "evicted",
    };
    let moves = rate.is_some_and(|rate| rate >= 1.0);
    let class = if moves { "arrow moves" } else { "arrow" };
    let (start, end) = if forth { (from + 8, to - 8) } else { (to - 8, from + 8) };
    let middle = usize::midpoint(from, to);
    let amount = rate.filter(|_| moves).map_or_else(|| "–".to_owned(), per_second);
    html! {
        line class=(class) x1=(start) x2=(end) y1=(height) y2=(height) marker-end="url(#tip)" {}
        text.rate x=(middle) y=(height - 10) text-anchor="middle" { (amount) }
        text.soft x=(middle) y=(height + 18) text-anchor="middle" { (name) }
    }
}
