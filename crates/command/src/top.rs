//! `cascade top`: the state of a running node, updated live in the terminal.

use std::collections::VecDeque;
use std::io::IsTerminal;
use std::time::Duration;

use cascade_block::ByteSize;
use cascade_node::status::{Status, TenantStatus};
use cascade_replay::figures::{grouped, percent};
use clap::Args;
use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Gauge, Paragraph, Row, Sparkline, Table};
use serde_json::json;

use crate::connection::{AdminConnection, ConnectionArgs};
use crate::{EXIT_OK, Failure, Screen, parse_time};

/// Points that each plot keeps.
const HISTORY_MAX: usize = 240;
/// Width and height of the page that --once prints, in characters.
const PAGE: (u16, u16) = (100, 32);

/// The node and the refresh interval.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade top
      Show hit rate, throughput, tiers and clients, once a second. The arrow keys select a tenant,
      q quits.
  cascade top --once
      Print one page as text, for a log or a ticket. Programs can use cascade status --json.")]
pub(super) struct TopArgs {
    /// Refresh interval.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_time)]
    every: Duration,
    /// Print one page and exit.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    connection: ConnectionArgs,
}

/// The state of the screen.
#[derive(Debug, Default)]
struct TopScreen {
    status: Status,
    /// The status before, if the same process reported it.
    previous: Option<Status>,
    /// Index of the selected tenant.
    tenant: usize,
    /// Hit rates in per mille, latest last; `None` without a request.
    hit_rates: VecDeque<Option<u64>>,
    /// Bytes read and put per second, latest last.
    throughputs: VecDeque<Option<u64>>,
    error: Option<String>,
}

pub(super) fn run(args: &TopArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let interval = args.every;
    let connection = args.connection.connect()?;
    let mut view = TopScreen::default();
    view.update(fetch(&connection)?);
    if args.once {
        screen.line(page(&view))?;
        return Ok(EXIT_OK);
    }
    if !std::io::stdout().is_terminal() {
        return Err(Failure::usage(
            "cascade top needs a terminal, but standard output is not one",
            "use cascade top --once, or cascade status --json",
        ));
    }
    let mut terminal = ratatui::try_init().map_err(|source| Failure::write("-", source))?;
    let ended = run_loop(&mut terminal, &connection, &mut view, interval);
    ratatui::restore();
    ended.map(|()| EXIT_OK)
}

fn fetch(connection: &AdminConnection) -> Result<Status, Failure> {
    connection.request("status", &json!({}))
}

/// Draws, and handles keys or fetches a new status, until the user quits.
fn run_loop(
    terminal: &mut ratatui::DefaultTerminal,
    connection: &AdminConnection,
    view: &mut TopScreen,
    interval: Duration,
) -> Result<(), Failure> {
    let failed = |source| Failure::write("-", source);
    loop {
        terminal.draw(|frame| draw(view, frame)).map_err(failed)?;
        if event::poll(interval).map_err(failed)? {
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
        match fetch(connection) {
            Ok(status) => view.update(status),
            // The node may come back: the last page stays, with the error in its second line.
            Err(failure) => view.error = Some(failure.explain()),
        }
    }
}

/// One page as text.
fn page(view: &TopScreen) -> String {
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

impl TopScreen {
    fn update(&mut self, status: Status) {
        let previous = std::mem::replace(&mut self.status, status);
        // The counters of a restarted node begin at zero again.
        self.previous = (previous.node.pid == self.status.node.pid).then_some(previous);
        self.error = None;
        let matched = self.increase(|tenant| tenant.hit_rate.matched_blocks);
        let requested = self.increase(|tenant| tenant.hit_rate.requested_blocks);
        let hit_rate = (requested > 0.0).then(|| whole(matched / requested * 1000.0));
        let bytes = self.increase(|tenant| tenant.gets.bytes + tenant.puts.bytes);
        let throughput = Some(whole(bytes / self.seconds()));
        for (history, latest) in
            [(&mut self.hit_rates, hit_rate), (&mut self.throughputs, throughput)]
        {
            history.push_back(latest);
            if history.len() > HISTORY_MAX {
                history.pop_front();
            }
        }
    }

    /// Seconds that [`TopScreen::increase`] covers.
    fn seconds(&self) -> f64 {
        let previous = self.previous.as_ref().map_or(0.0, |previous| previous.node.uptime_s);
        (self.status.node.uptime_s - previous).max(1e-3)
    }

    /// Increase of a counter of all tenants since the previous status, or since the start.
    #[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
    fn increase(&self, counter: impl Fn(&TenantStatus) -> u64) -> f64 {
        let sum = |status: &Status| status.tenants.iter().map(&counter).sum::<u64>();
        let previous = self.previous.as_ref().map_or(0, sum);
        sum(&self.status).saturating_sub(previous) as f64
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a plot's height")]
fn whole(value: f64) -> u64 {
    value.max(0.0).round() as u64
}

fn draw(view: &TopScreen, frame: &mut Frame<'_>) {
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
    let keys = "q quit   \u{2190} \u{2192} tenant   plots: each point covers one refresh interval";
    frame.render_widget(Paragraph::new(keys.dim()), foot);
}

fn draw_head(view: &TopScreen, frame: &mut Frame<'_>, area: Rect) {
    let node = &view.status.node;
    let title = format!(
        "cascade {}  pid {}  {}  up {:.0} s  {}  memory {}  CPU {:.1} s",
        node.version,
        node.pid,
        node.state.name(),
        node.uptime_s,
        node.socket,
        ByteSize(node.memory_bytes).rounded(),
        node.cpu_s,
    );
    let second = match &view.error {
        Some(error) => Line::from(error.replace('\n', " ").red().bold()),
        None => Line::from(view.status.notes.join("; ").yellow()),
    };
    frame.render_widget(Paragraph::new(vec![Line::from(title.bold()), second]), area);
}

fn draw_plots(view: &TopScreen, frame: &mut Frame<'_>, area: Rect) {
    let halves = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]);
    let [left, right] = halves.areas(area);
    let latest = |history: &VecDeque<Option<u64>>| history.back().copied().flatten();
    let hit_title = match latest(&view.hit_rates) {
        Some(hits) => format!(" hit rate {}.{} % ", hits / 10, hits % 10),
        None => " hit rate - (no requests) ".to_owned(),
    };
    let throughput = latest(&view.throughputs).map(|bytes| ByteSize(bytes).rounded());
    let throughput = throughput.map_or_else(|| "-".to_owned(), |bytes| format!("{bytes}/s"));
    let throughput_title = format!(" reads and puts {throughput} ");
    for (area, title, history, max, colour) in [
        (left, hit_title, &view.hit_rates, Some(1000), Color::Green),
        (right, throughput_title, &view.throughputs, None, Color::Cyan),
    ] {
        let width = usize::from(area.width.saturating_sub(2));
        let shown: Vec<Option<u64>> = history.iter().rev().take(width).rev().copied().collect();
        let mut plot = Sparkline::default()
            .data(shown)
            .style(Style::default().fg(colour))
            .block(Block::bordered().title(title));
        if let Some(max) = max {
            plot = plot.max(max);
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
        row("misses", format!("{missed} (+ {failed} failed)")),
        row("puts", format!("{} stored of {}", grouped(puts.stored), grouped(puts.blocks))),
        row("evicted", ByteSize(tenant.evictions.bytes).rounded()),
        row("demoted", ByteSize(tenant.mover.demoted_bytes).rounded()),
        row("promoted", ByteSize(tenant.mover.promoted_bytes).rounded()),
        row("pending", ByteSize(tenant.mover.pending_bytes).rounded()),
    ]);
    rows.extend(tenant.shadows.iter().map(|shadow| {
        let rate = format!("{} predicted hit rate", percent(shadow.predicted_hit_rate));
        row(&format!("{} at {} %", shadow.tier, shadow.capacity_percent), rate)
    }));
    let widths = [Constraint::Length(18), Constraint::Min(10)];
    let table = Table::new(rows, widths).block(Block::bordered().title(" since the start "));
    frame.render_widget(table, area);
}

fn draw_clients(view: &TopScreen, frame: &mut Frame<'_>, area: Rect) {
    let clients = &view.status.clients;
    let rows = clients.list.iter().map(|client| {
        let held = ByteSize(client.leased_bytes + client.reserved_bytes).rounded();
        let idle = format!("{:.0} s", client.silent_s);
        let row = Row::new([
            client.pid.to_string(),
            client.name.clone(),
            held,
            grouped(client.leases),
            idle,
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
        .header(Row::new(["pid", "name", "holds", "leases", "idle"]).bold())
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
    fn a_page_shows_tiers_clients_and_the_hit_rate_since_the_last_refresh() {
        let mut view = TopScreen::default();
        view.update(status(10.0, 100));
        let mut next = status(11.0, 100);
        next.tenants[0].hit_rate = HitRate::of(300, 100);
        view.update(next);
        let page = page(&view);
        // 100 more blocks were requested, none matched.
        assert!(page.contains("hit rate 0.0 %"), "{page}");
        assert!(page.contains("512.0 MiB of 1.0 GiB"), "{page}");
        assert!(page.contains("4321") && page.contains("vllm"), "{page}");
        assert_eq!(view.hit_rates, [Some(500), Some(0)]);
    }

    /// A second without a request was shown as a hit rate of 0 %.
    #[test]
    fn a_time_without_requests_has_no_hit_rate() {
        let mut view = TopScreen::default();
        view.update(status(10.0, 100));
        view.update(status(11.0, 100));
        assert_eq!(view.hit_rates, [Some(500), None]);
        let page = page(&view);
        assert!(page.contains("hit rate - (no requests)"), "{page}");
    }

    #[test]
    fn a_restarted_node_is_not_compared_with_the_previous_one() {
        let mut view = TopScreen::default();
        view.update(status(1000.0, 100));
        let mut next = status(1.0, 10);
        next.node.pid = 8;
        view.update(next);
        assert_eq!(view.hit_rates, [Some(500), Some(500)]);
    }
}
