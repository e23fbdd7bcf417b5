//! The HTML page: the main result in one sentence, the figures, the plots, the environment.

use cascade_block::ByteSize;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::figures::{
    duration, grouped, headline, payload_line, percent, short_count, span, trace_lines,
};
use crate::report::palette::Hue;
use crate::report::{PlotError, STYLE, captions, charts};
use crate::result::ReplayResult;

/// The whole page. It loads nothing from the network.
pub fn page(result: &ReplayResult) -> Result<String, PlotError> {
    let plots = plots(result)?;
    let data = serde_json::to_string(result)
        .map_err(|error| PlotError { plot: "embedded figures", reason: error.to_string() })?;
    // A closing tag inside the data would end the script element.
    let data = data.replace("</", "<\\/");
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Cascade replay of " (result.trace.name) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    header {
                        p.kicker { (kicker(result)) }
                        h1 { (headline(result)) }
                        p.payload { (payload_line(result)) }
                        @for line in trace_lines(result) { p.payload { (line) } }
                    }
                    (alarms(result))
                    (tiles(result))
                    div.plots { (plots) }
                    (environment(result))
                }
                script type="application/json" id="cascade-replay" { (PreEscaped(data)) }
            }
        }
    };
    Ok(page.into_string())
}

fn kicker(result: &ReplayResult) -> String {
    let files = if result.files_bytes > 0 {
        format!(" and files of {}", ByteSize(result.files_bytes))
    } else {
        String::new()
    };
    format!(
        "{}: {} requests in {} of traffic, replayed through {} with DRAM of {}{files}, policy {}",
        result.trace.name,
        grouped(result.requests),
        span(result.trace.seconds),
        result.run.pipeline,
        ByteSize(result.dram_bytes),
        result.policy,
    )
}

fn alarms(result: &ReplayResult) -> Markup {
    html! {
        @if result.wrong_blocks > 0 {
            p.alarm {
                b { (grouped(result.wrong_blocks)) " wrong blocks. " }
                "The cache returned bytes that were not stored under their key. Find the cause "
                "before you use any other figure on this page."
            }
        }
        @if !result.failures.is_empty() {
            p.alarm {
                "Some calls failed and counted as misses: "
                @for (message, count) in &result.failures { (grouped(*count)) " x " (message) ". " }
            }
        }
    }
}

fn tile(class: &str, value: &str, what: &str) -> Markup {
    html! { div class={ "tile " (class) } { b { (value) } span { (what) } } }
}

fn tiles(result: &ReplayResult) -> Markup {
    let hit =
        format!("hit rate; an unbounded cache reaches {}", percent(result.ceilings.unbounded));
    let tokens = short_count(result.blocks_hit * u64::from(result.trace.block_tokens));
    let speed = result.latency.as_ref().and_then(|latency| {
        let (tier, reads) = latency.read.iter().max_by_key(|(_, reads)| reads.count)?;
        Some((duration(reads.us_p99), format!("p99 latency of a read from {tier}")))
    });
    let class = if result.wrong_blocks == 0 { "good" } else { "bad" };
    let checked =
        format!("wrong blocks of {} read, every byte checked", short_count(result.blocks_hit));
    html! {
        div.tiles {
            (tile("", &percent(result.hit_rate), &hit))
            (tile("", &tokens, "prompt tokens whose computation the cache saves"))
            @if !result.run.metadata_only {
                @if let Some((value, what)) = &speed { (tile("", value, what)) }
                (tile(class, &grouped(result.wrong_blocks), &checked))
            }
        }
    }
}

/// A plot with its title, legend and caption.
struct PlotFigure<'a> {
    title: &'a str,
    class: &'a str,
    legend: &'a [(String, Hue)],
    svg: String,
    caption: String,
}

fn figure(figure: &PlotFigure<'_>) -> Markup {
    html! {
        figure class=(figure.class) {
            h2 { (figure.title) }
            ul.legend {
                @for (name, hue) in figure.legend { li { i class=(hue.class()) {} (name) } }
            }
            div role="img" aria-label={ (figure.title) ". " (figure.caption) } {
                (PreEscaped(&figure.svg))
            }
            figcaption { (figure.caption) }
        }
    }
}

fn plots(result: &ReplayResult) -> Result<Markup, PlotError> {
    let tiers = result.tiers();
    let mut legend: Vec<(String, Hue)> =
        tiers.iter().map(|tier| (format!("hit in {tier}"), Hue::of_tier(tier))).collect();
    legend.push(("unbounded cache".to_owned(), Hue::Best));
    let mut figures = vec![figure(&PlotFigure {
        title: "Hit rate over time, by tier",
        class: "wide",
        legend: &legend,
        svg: charts::hits_over_time(result)?,
        caption: captions::over_time(result),
    })];
    if !result.dram_sweep.is_empty() {
        figures.push(figure(&PlotFigure {
            title: "Hit rate by DRAM capacity",
            class: "",
            legend: &[
                (format!("policy {}", result.policy), Hue::Dram),
                ("Belady's optimum".to_owned(), Hue::Best),
                ("unbounded cache".to_owned(), Hue::Soft),
            ],
            svg: charts::dram_sizes(result)?,
            caption: captions::dram_sizes(result),
        }));
    }
    figures.push(figure(&PlotFigure {
        title: "Reuse distance of blocks",
        class: "",
        legend: &[
            ("within this run's DRAM".to_owned(), Hue::Dram),
            ("larger than that".to_owned(), Hue::Miss),
        ],
        svg: charts::reuse_distances(result)?,
        caption: captions::reuse(result),
    }));
    if result.latency.is_some() {
        let lines = charts::latency_lines(result);
        let legend: Vec<_> = lines.into_iter().map(|line| (line.name, line.hue)).collect();
        figures.push(figure(&PlotFigure {
            title: "Latency of calls, cumulative",
            class: "",
            legend: &legend,
            svg: charts::latencies(result)?,
            caption: captions::latencies(result),
        }));
        figures.push(figure(&PlotFigure {
            title: "Bytes moved",
            class: "",
            legend: &[],
            svg: charts::bytes_moved(result)?,
            caption: captions::bytes(result),
        }));
    }
    Ok(html! { @for figure in figures { (figure) } })
}

fn environment(result: &ReplayResult) -> Markup {
    let environment = &result.environment;
    let (build, disk) = (&environment.build, environment.disk.as_ref());
    let disk =
        disk.map(|disk| format!("{} on {} ({})", disk.file_system, disk.source, disk.options));
    let rows = [
        ("command", environment.argv.join(" ")),
        ("processor", format!("{} x {}", environment.cpu_count, environment.cpu)),
        ("memory", ByteSize(environment.memory_bytes).rounded()),
        ("kernel", environment.kernel.clone()),
        ("disk of the file tier", disk.unwrap_or_else(|| "no file tier".to_owned())),
        (
            "version",
            format!("{} ({}, opt-level {})", environment.version, build.profile, build.opt_level),
        ),
        ("commit", build.commit.clone()),
        ("wall time", format!("{:.1} s, {} worker(s)", result.seconds, result.run.threads)),
    ];
    environment_table(&rows, "cascade-replay")
}

/// The table of what was measured with, which opens on demand. `element` has the figures.
pub fn environment_table(rows: &[(&str, String)], element: &str) -> Markup {
    html! {
        details {
            summary { "Environment of the measurement" }
            div.scroll {
                table { @for (name, value) in rows { tr { th { (name) } td { (value) } } } }
            }
            p {
                "This page contains all figures as JSON, in the element "
                code { (element) } "."
            }
        }
    }
}
