//! `cascade top`: a running node, live in the terminal.

use std::collections::VecDeque;
use std::io::IsTerminal;
use std::time::Duration;

use cascade_block::ByteSize;
use cascade_node::status::{Status, TenantStatus};
use clap::Args;
use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Gauge, Paragraph, Row, Sparkline, Table};
use serde_json::json;

use crate::cli::reach::{Asker, Reach};
use crate::cli::{EXIT_OK, Failure, Screen, parse_time};
use crate::replay::summary::{grouped, percent};

/// Points that the plots of the past keep.
const PAST_MAX: usize = 240;
/// A page printed with --once is this wide and high, in characters.
const PAGE: (u16, u16) = (100, 32);

/// What to watch, and how often.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade top
      Tiers, hit rates, flows and clients, once a second. Arrows choose a tenant, q ends it.
  cascade top --once
      One page as text, for a log or a ticket. For programs: cascade status --json.")]
pub(super) struct TopArgs {
    /// Time between two looks.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_time)]
    every: Duration,
    /// Print one page and exit.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    reach: Reach,
}

/// What is on the screen.
#[derive(Debug, Default)]
struct View {
    status: Status,
    before: Option<Status>,
    tenant: usize,
    /// Hit rates in per mille, and bytes per second, latest last.
    hit_rates: VecDeque<u64>,
    rates: VecDeque<u64>,
    trouble: Option<String>,
}

pub(super) fn run(args: &TopArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let every = args.every;
    let asker = args.reach.connect()?;
    let mut view = View::default();
    view.take(look(&asker)?);
    if args.once {
        screen.line(page(&view))?;
        return Ok(EXIT_OK);
    }
    if !std::io::stdout().is_terminal() {
        return Err(Failure::usage(
            "cascade top draws on a terminal, and this is none",
            "use cascade top --once, or cascade status --json",
        ));
    }
    let mut terminal = ratatui::try_init().map_err(|source| Failure::write("-", source))?;
    let watched = watch(&mut terminal, &asker, &mut view, every);
    ratatui::restore();
    watched.map(|()| EXIT_OK)
}

fn look(asker: &Asker) -> Result<Status, Failure> {
    asker.ask("status", &json!({}))
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    asker: &Asker,
    view: &mut View,
    every: Duration,
) -> Result<(), Failure> {
    let failed = |source| Failure::write("-", source);
    loop {
        terminal.draw(|frame| draw(view, frame)).map_err(failed)?;
        if event::poll(every).map_err(failed)? {
            if let Event::Key(key) = event::read().map_err(failed)?
                && key.kind == KeyEventKind::Press
            {
                let last = view.status.tenants.len().saturating_sub(1);
                match key.code {
                    KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                    KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                        return Ok(());
                    }
                    KeyCode::Right | KeyCode::Down => view.tenant = last.min(view.tenant + 1),
                    KeyCode::Left | KeyCode::Up => view.tenant = view.tenant.saturating_sub(1),
                    _ => {}
                }
            }
            continue;
        }
        match look(asker) {
            Ok(status) => view.take(status),
            // It may come back: the last page stays, with a word about it.
            Err(failure) => view.trouble = Some(failure.explain()),
        }
    }
}

/// One page as text.
fn page(view: &View) -> String {
    let (width, height) = PAGE;
    let backend = ratatui::backend::TestBackend::new(width, height);
    let Ok(mut terminal) = ratatui::Terminal::new(backend);
    let Ok(_) = terminal.draw(|frame| draw(view, frame));
    let buffer = terminal.backend().buffer();
    let line = |y: u16| {
        let symbols = (0..width).map(|x| buffer[(x, y)].symbol());
        symbols.collect::<String>().trim_end().to_owned()
    };
    (0..height).map(line).collect::<Vec<_>>().join("\n")
}

impl View {
    fn take(&mut self, status: Status) {
        let before = std::mem::replace(&mut self.status, status);
        self.before = (before.node.pid == self.status.node.pid).then_some(before);
        self.trouble = None;
        let hit_rate = self.lately(|tenant| tenant.hit_rate.matched_blocks)
            / self.lately(|tenant| tenant.hit_rate.requested_blocks).max(1.0);
        let bytes = self.lately(|tenant| tenant.gets.bytes + tenant.puts.bytes) / self.seconds();
        for (past, now) in [(&mut self.hit_rates, hit_rate * 1000.0), (&mut self.rates, bytes)] {
            past.push_back(whole(now));
            if past.len() > PAST_MAX {
                past.pop_front();
            }
        }
    }

    /// Seconds that the figures of lately cover.
    fn seconds(&self) -> f64 {
        let before = self.before.as_ref().map_or(0.0, |before| before.node.uptime_s);
        (self.status.node.uptime_s - before).max(1e-3)
    }

    /// How much a counter of all tenants grew since the last look; since the start at first.
    #[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
    fn lately(&self, counter: impl Fn(&TenantStatus) -> u64) -> f64 {
        let sum = |status: &Status| status.tenants.iter().map(&counter).sum::<u64>();
        let before = self.before.as_ref().map_or(0, sum);
        sum(&self.status).saturating_sub(before) as f64
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a plot's height")]
fn whole(value: f64) -> u64 {
    value.max(0.0).round() as u64
}

fn draw(view: &View, frame: &mut Frame<'_>) {
    let rows = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(6),
        Constraint::Length(6),
        Constraint::Min(8),
        Constraint::Length(1),
    ]);
    let [head, plots, fill, tables, foot] = rows.areas(frame.area());
    draw_head(view, frame, head);
    draw_plots(view, frame, plots);
    let none = TenantStatus::default();
    let tenant = view.status.tenants.get(view.tenant).unwrap_or(&none);
    draw_fill(tenant, frame, fill);
    let [left, right] =
        Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]).areas(tables);
    draw_tenant(tenant, frame, left);
    draw_clients(view, frame, right);
    let keys = "q quits   \u{2190} \u{2192} tenant   figures of the plots: since the last look";
    frame.render_widget(Paragraph::new(keys.dim()), foot);
}

fn draw_head(view: &View, frame: &mut Frame<'_>, area: Rect) {
    let node = &view.status.node;
    let title = format!(
        "cascade {} pid {} {}  up {:.0} s  {}  memory {}  CPU {:.1} s",
        node.version,
        node.pid,
        node.state.name(),
        node.uptime_s,
        node.socket,
        ByteSize(node.memory_bytes).rounded(),
        node.cpu_s,
    );
    let second = match &view.trouble {
        Some(trouble) => Line::from(trouble.replace('\n', " ").red().bold()),
        None => Line::from(view.status.notes.join("; ").yellow()),
    };
    frame.render_widget(Paragraph::new(vec![Line::from(title.bold()), second]), area);
}

fn draw_plots(view: &View, frame: &mut Frame<'_>, area: Rect) {
    let halves = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]);
    let [left, right] = halves.areas(area);
    let latest = |past: &VecDeque<u64>| past.back().copied().unwrap_or(0);
    let (hits, rate) = (latest(&view.hit_rates), latest(&view.rates));
    let hit_title = format!(" hit rate {}.{} % ", hits / 10, hits % 10);
    let rate_title = format!(" read and put {}/s ", ByteSize(rate).rounded());
    for (area, title, past, most, colour) in [
        (left, hit_title, &view.hit_rates, Some(1000), Color::Green),
        (right, rate_title, &view.rates, None, Color::Cyan),
    ] {
        let room = usize::from(area.width.saturating_sub(2));
        let shown: Vec<u64> = past.iter().rev().take(room).rev().copied().collect();
        let mut plot = Sparkline::default()
            .data(shown)
            .style(Style::default().fg(colour))
            .block(Block::bordered().title(title));
        if let Some(most) = most {
            plot = plot.max(most);
        }
        frame.render_widget(plot, area);
    }
}

fn draw_fill(tenant: &TenantStatus, frame: &mut Frame<'_>, area: Rect) {
    let block = Block::bordered().title(format!(" tenant {} ", tenant.name));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let lines = Layout::vertical(tenant.tiers.iter().map(|_| Constraint::Length(1))).split(inner);
    for (tier, area) in tenant.tiers.iter().zip(lines.iter()) {
        #[expect(clippy::cast_precision_loss, reason = "a bar's length")]
        let ratio = tier.used_bytes as f64 / tier.capacity_bytes.max(1) as f64;
        let health = match &tier.health {
            Some(health) if health.state.name() != "healthy" => {
                format!("  {}: {}", health.state.name(), health.last_error.as_deref().unwrap_or(""))
            }
            Some(_) | None => String::new(),
        };
        let label = format!(
            "{:<8} {} of {}{health}",
            tier.name,
            ByteSize(tier.used_bytes).rounded(),
            ByteSize(tier.capacity_bytes).rounded()
        );
        let colour = if health.is_empty() { Color::Blue } else { Color::Red };
        let gauge = Gauge::default()
            .ratio(ratio.clamp(0.0, 1.0))
            .label(label)
            .gauge_style(Style::default().fg(colour));
        frame.render_widget(gauge, *area);
    }
}

fn draw_tenant(tenant: &TenantStatus, frame: &mut Frame<'_>, area: Rect) {
    let row = |name: &str, value: String| Row::new([Cell::from(name.to_owned()), value.into()]);
    let mut rows: Vec<Row<'_>> = tenant
        .tiers
        .iter()
        .map(|tier| {
            let blocks = grouped(tier.hits);
            let read = format!("{blocks} blocks, {}", ByteSize(tier.hit_bytes).rounded());
            row(&format!("read from {}", tier.name), read)
        })
        .collect();
    let (rate, gets, puts) = (&tenant.hit_rate, &tenant.gets, &tenant.puts);
    let (missed, failed) = (grouped(gets.misses), grouped(gets.failures));
    let ratio = rate.ratio.map_or_else(|| "-".to_owned(), percent);
    rows.insert(0, row("hit rate", format!("{ratio} of {}", grouped(rate.requested_blocks))));
    rows.extend([
        row("missed", format!("{missed} (+ {failed} failed)")),
        row("puts", format!("{} stored of {}", grouped(puts.stored), grouped(puts.blocks))),
        row("evicted", ByteSize(tenant.evictions.bytes).rounded()),
        row("demoted", ByteSize(tenant.mover.demoted_bytes).rounded()),
        row("promoted", ByteSize(tenant.mover.promoted_bytes).rounded()),
        row("pending", ByteSize(tenant.mover.pending_bytes).rounded()),
    ]);
    rows.extend(tenant.shadows.iter().map(|shadow| {
        let rate = format!("{} hit rate of lookups", percent(shadow.predicted_hit_rate));
        row(&format!("{} at {} %", shadow.tier, shadow.capacity_percent), rate)
    }));
    let widths = [Constraint::Length(18), Constraint::Min(10)];
    let table = Table::new(rows, widths).block(Block::bordered().title(" since the start "));
    frame.render_widget(table, area);
}

fn draw_clients(view: &View, frame: &mut Frame<'_>, area: Rect) {
    let clients = &view.status.clients;
    let rows = clients.list.iter().map(|client| {
        let held = ByteSize(client.leased_bytes + client.reserved_bytes).rounded();
        let silent = format!("{:.0} s", client.silent_s);
        let row = Row::new([
            client.pid.to_string(),
            client.name.clone(),
            held,
            grouped(client.leases),
            silent,
        ]);
        if client.is_stopped { row.style(Style::default().fg(Color::Red)) } else { row }
    });
    let widths = [
        Constraint::Length(8),
        Constraint::Min(10),
        Constraint::Length(9),
        Constraint::Length(7),
        Constraint::Length(8),
    ];
    let title = format!(" {} clients ", grouped(clients.connected));
    let table = Table::new(rows, widths)
        .header(Row::new(["pid", "name", "holds", "leases", "silent"]).bold())
        .block(Block::bordered().title(title));
    frame.render_widget(table, area);
}

#[cfg(test)]
mod tests {
    use cascade_node::status::{ClientStatus, HitRate, TierStatus};

    use super::*;

    fn status(uptime_s: f64, matched: u64) -> Status {
        let mut status = Status::default();
        status.node.pid = 7;
        status.node.uptime_s = uptime_s;
        let mut tenant = TenantStatus { name: "default".to_owned(), ..TenantStatus::default() };
        tenant.hit_rate = HitRate::of(2 * matched, matched);
        tenant.tiers.push(TierStatus {
            name: "dram".to_owned(),
            capacity_bytes: 1 << 30,
            used_bytes: 1 << 29,
            ..TierStatus::default()
        });
        status.tenants.push(tenant);
        status.clients.connected = 1;
        status.clients.list.push(ClientStatus {
            pid: 4321,
            name: "vllm".to_owned(),
            ..ClientStatus::default()
        });
        status
    }

    #[test]
    fn a_page_shows_tiers_clients_and_the_hit_rate_since_the_last_look() {
        let mut view = View::default();
        view.take(status(10.0, 100));
        let mut next = status(11.0, 100);
        next.tenants[0].hit_rate = HitRate::of(300, 100);
        view.take(next);
        let page = page(&view);
        // 100 more were asked for, none matched.
        assert!(page.contains("hit rate 0.0 %"), "{page}");
        assert!(page.contains("512.0 MiB of 1.0 GiB"), "{page}");
        assert!(page.contains("4321") && page.contains("vllm"), "{page}");
        assert_eq!(view.hit_rates, [500, 0]);
    }

    #[test]
    fn a_node_that_was_started_anew_is_not_compared_with_the_old_one() {
        let mut view = View::default();
        view.take(status(1000.0, 100));
        let mut next = status(1.0, 10);
        next.node.pid = 8;
        view.take(next);
        assert_eq!(view.hit_rates, [500, 500]);
    }
}
