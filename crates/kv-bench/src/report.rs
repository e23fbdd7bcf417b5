//! The HTML report: one file with figures, plots and the environment. It loads nothing.

use cascade_block::ByteSize;
use cascade_replay::figures::{duration, grouped, percent};
use cascade_replay::report::palette::Hue;
use cascade_replay::report::plot::{Axis, WIDE, failed, svg};
use cascade_replay::report::{PlotError, STYLE, environment_table};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use plotters::prelude::*;

use crate::GIB;
use crate::backend::KvTier;
use crate::criteria::Criterion;
use crate::histogram::LatencyHistogram;
use crate::qos::QosClass;
use crate::result::KvResult;

/// The whole page.
///
/// # Errors
/// If a plot cannot be drawn.
pub fn page(result: &KvResult) -> Result<String, PlotError> {
    let plots = [
        plot(
            "Bytes moved over time",
            "wide",
            &[("read".to_owned(), Hue::Dram), ("written".to_owned(), Hue::Files)],
            &rates(result)?,
            "GiB a second in each slice of the window. Operations that ended after the window \
             count with the part of their time within it.",
        ),
        plot(
            "Latency of whole contexts, cumulative",
            "wide",
            &lines(result).into_iter().map(|(name, hue, _)| (name, hue)).collect::<Vec<_>>(),
            &latencies(result)?,
            "A read is one read of a request's whole context, by the slowest tier that gave a \
             block. A write is one prefill. Comparing bytes is not included.",
        ),
    ];
    // A closing tag inside the data would end the script element.
    let data = result.to_json().to_string().replace("</", "<\\/");
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Cascade KV cache benchmark, " (result.workload.model.name) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    header {
                        p.kicker { (kicker(result)) }
                        h1 { (headline(result)) }
                    }
                    (alarms(result))
                    (tiles(result))
                    (assessment(result))
                    div.plots { @for plot in plots { (plot) } }
                    (latency_table(result))
                    (environment(result))
                }
                script type="application/json" id="cascade-bench-kv" { (PreEscaped(data)) }
            }
        }
    };
    Ok(page.into_string())
}

/// The main result in one sentence.
pub fn headline(result: &KvResult) -> String {
    let figures = result.figures();
    let state = match (result.validity.is_valid, result.outcome.was_stopped) {
        (false, _) => "INVALID: ",
        (true, true) => "PARTIAL, interrupted: ",
        (true, false) => "",
    };
    format!(
        "{state}{:.2} GiB/s read and {:.2} GiB/s written over {:.1} s; {} requests answered, hit \
         rate {}.",
        result.gib_per_second(result.counted(figures.read_total())),
        result.gib_per_second(result.counted(figures.written)),
        result.seconds(),
        grouped(figures.requests),
        figures.hit_rate().map_or("unknown".to_owned(), percent),
    )
}

fn kicker(result: &KvResult) -> String {
    let sizes = &result.sizes;
    let gpu = if sizes.gpu_bytes > 0 {
        format!("{} of simulated GPU memory, ", ByteSize(sizes.gpu_bytes).rounded())
    } else {
        String::new()
    };
    format!(
        "{}{}: {} users on {gpu}{} of DRAM and files of {}, generation {}, seed {}",
        if result.objects().is_some() { "mode: compatible. " } else { "" },
        result.workload.model.name,
        grouped(u64::from(result.workload.users)),
        ByteSize(sizes.cpu_bytes).rounded(),
        ByteSize(sizes.files_bytes).rounded(),
        result.generation_mode,
        result.workload.seed,
    )
}

fn alarms(result: &KvResult) -> Markup {
    html! {
        @for reason in &result.validity.reasons { p.alarm { b { "INVALID. " } (reason.text) "." } }
        @for (message, count) in &result.figures().failures {
            p.alarm { (grouped(*count)) " x " (message) }
        }
        @for note in result.mode_notes() { p.payload { (note) "." } }
        @for part in result.simulated() { p.payload { "Simulated: " (part) "." } }
        @for note in result.notes() { p.payload { "Note: " (note) "." } }
    }
}

fn tile(class: &str, value: &str, what: &str) -> Markup {
    html! { div class={ "tile " (class) } { b { (value) } span { (what) } } }
}

fn tiles(result: &KvResult) -> Markup {
    let figures = result.figures();
    let rate = |moved| format!("{:.2} GiB/s", result.gib_per_second(result.counted(moved)));
    let storage = KvTier::Storage.index();
    let (read, written) = (figures.read_total(), result.written_by_tier()[storage]);
    let written_name = match result.objects() {
        None => "written, through to files",
        Some(_) => "written to files",
    };
    let compared = match result.objects() {
        None => "blocks",
        Some(_) => "entries",
    };
    let (all, store) = result.cpu_seconds_per_gib();
    let wrong = if figures.wrong_blocks == 0 { "good" } else { "bad" };
    html! {
        div.tiles {
            (tile("", &rate(read), "read, from all tiers"))
            (tile("", &rate(figures.read[storage]), "of this from files"))
            (tile("", &rate(written), written_name))
            (tile("", &format!("{all:.2} s"), &format!(
                "processor time a GiB; {store:.2} s without making and comparing bytes"
            )))
            (tile(wrong, &grouped(figures.wrong_blocks), &format!(
                "wrong {compared} of {} compared", grouped(figures.verified_blocks)
            )))
        }
    }
}

/// A criterion's figure as text.
pub fn actual_text(criterion: &Criterion) -> String {
    match (criterion.actual, criterion.unit) {
        (None, _) => "not judged, no samples".to_owned(),
        (Some(actual), "ratio") => format!("{:.1}%", actual * 100.0),
        (Some(actual), "ms") => format!("{actual:.2}ms"),
        (Some(actual), unit) => format!("{actual:.2} {unit}"),
    }
}

fn assessment(result: &KvResult) -> Markup {
    let assessment = &result.assessment;
    html! {
        h2 {
            "Assessment: " (assessment.overall_status) ", " (assessment.passed_count) " of "
            (assessment.total_count) " criteria pass"
            @if result.objects().is_some() {
                @let stated = result.stated_assessment();
                "; as in the original: " (stated.overall_status) ", " (stated.passed_count) " of "
                (stated.total_count)
            }
        }
        div.scroll {
            table {
                @for criterion in &assessment.criteria {
                    tr {
                        th { (criterion.name) }
                        td { (actual_text(criterion)) }
                        td {
                            @match criterion.passed {
                                Some(true) => "PASS",
                                Some(false) => "FAIL",
                                None if result.objects().is_some() => {
                                    "not judged; the original leaves it out"
                                }
                                None => "not judged",
                            }
                        }
                    }
                }
            }
        }
    }
}

fn plot(title: &str, class: &str, legend: &[(String, Hue)], svg: &str, caption: &str) -> Markup {
    html! {
        figure class=(class) {
            h2 { (title) }
            ul.legend { @for (name, hue) in legend { li { i class=(hue.class()) {} (name) } } }
            div role="img" aria-label={ (title) ". " (caption) } { (PreEscaped(svg)) }
            figcaption { (caption) }
        }
    }
}

fn rates(result: &KvResult) -> Result<String, PlotError> {
    let fail = failed("bytes over time");
    let timeline = &result.figures().timeline;
    let length = timeline.slice_seconds();
    let slices = timeline.slices();
    let window = result.seconds();
    // The last slice may be longer than the rest of the window; a moment of it has no rate.
    let rest = |end: f64| length - (end - window).max(0.0);
    let curve = |bytes: fn(&crate::timeline::Slice) -> u64| -> Vec<(f64, f64)> {
        let slices = slices.iter().filter(|(end, _)| rest(*end) > length * 0.2);
        let point = |(end, it): &(f64, crate::timeline::Slice)| {
            (end.min(window), bytes(it) as f64 / GIB / rest(*end))
        };
        slices.map(point).collect()
    };
    let curves =
        [(Hue::Dram, curve(|it| it.read_bytes)), (Hue::Files, curve(|it| it.written_bytes))];
    let points = curves.iter().flat_map(|(_, points)| points);
    let most = points.map(|(_, rate)| *rate).fold(1e-3, f64::max) * 1.1;
    let x = Axis {
        range: 0.0..window.max(1e-3),
        title: "seconds since the start of the window",
        labels: 12,
        write: &|seconds: &f64| format!("{seconds:.0}"),
        room: 42,
    };
    let write = |rate: &f64| format!("{rate:.2}");
    let y = Axis { range: 0.0..most, title: "GiB/s", labels: 6, write: &write, room: 60 };
    svg("bytes over time", WIDE, x, y, |chart| {
        for (hue, points) in &curves {
            let line = LineSeries::new(points.iter().copied(), hue.marker().stroke_width(2));
            chart.draw_series(line).map_err(|error| fail(&error))?;
        }
        Ok(())
    })
}

fn lines(result: &KvResult) -> Vec<(String, Hue, &LatencyHistogram)> {
    let figures = result.figures();
    let [gpu, cpu, storage] = &figures.read_by_tier;
    let all = [
        ("read, simulated GPU", Hue::Best, gpu),
        ("read, DRAM", Hue::Dram, cpu),
        ("read, files", Hue::Files, storage),
        ("write", Hue::Other, &figures.write),
    ];
    let all = all.into_iter().filter(|(_, _, histogram)| histogram.count() > 0);
    all.map(|(name, hue, histogram)| (name.to_owned(), hue, histogram)).collect()
}

fn latencies(result: &KvResult) -> Result<String, PlotError> {
    let fail = failed("latencies");
    let curves: Vec<(Hue, Vec<(f64, f64)>)> =
        lines(result).into_iter().map(|(_, hue, it)| (hue, it.cumulative())).collect();
    let bounds = || curves.iter().flat_map(|(_, points)| points.iter().map(|(ms, _)| *ms));
    let (low, high) = (bounds().fold(f64::MAX, f64::min), bounds().fold(f64::MIN, f64::max));
    let (low, high) = if low < high { (low.max(1e-3), high) } else { (1.0, 1e3) };
    let x = Axis {
        range: (low / 1.5..high).log_scale(),
        title: "latency",
        labels: 8,
        write: &|ms: &f64| duration(*ms * 1e3),
        room: 42,
    };
    let write = |share: &f64| format!("{:.0} %", share * 100.0);
    let y = Axis { range: 0.0..1.0, title: "", labels: 6, write: &write, room: 48 };
    svg("latencies", WIDE, x, y, |chart| {
        for (hue, points) in &curves {
            let line = LineSeries::new(points.iter().copied(), hue.marker().stroke_width(2));
            chart.draw_series(line).map_err(|error| fail(&error))?;
        }
        Ok(())
    })
}

fn latency_table(result: &KvResult) -> Markup {
    let figures = result.figures();
    let mut rows = vec![
        ("end to end".to_owned(), &figures.end_to_end),
        ("waiting for a worker".to_owned(), &figures.queue),
        ("all calls of a request".to_owned(), &figures.storage),
        ("generation (simulated)".to_owned(), &figures.generation),
        ("prefill (write)".to_owned(), &figures.write),
        ("reload of earlier turns (read)".to_owned(), &figures.reload),
        ("decode (read)".to_owned(), &figures.decode),
        ("chunks of documents (read)".to_owned(), &figures.retrieval),
    ];
    let classes = QosClass::ALL.into_iter();
    rows.extend(classes.map(|class| {
        let latency = &figures.classes[class.index()].latency;
        (format!("end to end, class {}", class.name()), latency)
    }));
    html! {
        h2 { "Latencies in ms" }
        div.scroll {
            table {
                tr {
                    @for name in ["", "count", "mean", "P50", "P95", "P99", "P99.9", "P99.99"] {
                        th { (name) }
                    }
                }
                @for (name, histogram) in rows {
                    tr {
                        th { (name) }
                        @let it = histogram.percentiles();
                        td { (grouped(it.count)) }
                        @if it.count > 0 {
                            @for ms in [it.mean, it.p50, it.p95, it.p99, it.p999, it.p9999] {
                                td { (format!("{ms:.2}")) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn environment(result: &KvResult) -> Markup {
    let environment = &result.environment;
    let disk = environment.disk.as_ref();
    let disk =
        disk.map(|disk| format!("{} on {} ({})", disk.file_system, disk.source, disk.options));
    let build = &environment.build;
    let rows = [
        ("command", environment.argv.join(" ")),
        ("processor", format!("{} x {}", environment.cpu_count, environment.cpu)),
        ("load average before", environment.load_average.clone().unwrap_or_default()),
        ("memory", ByteSize(environment.memory_bytes).rounded()),
        ("kernel", environment.kernel.clone()),
        ("disk", disk.unwrap_or_else(|| "unknown".to_owned())),
        ("build", format!("{}, {}, opt-level {}", build.commit, build.profile, build.opt_level)),
        ("digest of all operations", result.figures().operations.text()),
    ];
    environment_table(&rows, "cascade-bench-kv")
}
