//! The comparison as one HTML file. It loads nothing.

use cascade_replay::report::{STYLE, environment_table};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::suite::comparison::Comparison;
use crate::suite::table::{COMPATIBLE, LATENCIES, LEGEND, RATES, Row};

/// The element with all figures.
const DATA: &str = "cascade-bench-kv-suite";

/// The whole page.
pub fn page(comparison: &Comparison) -> String {
    let rows: Vec<Row> = comparison.outcomes.iter().map(Row::of).collect();
    let rates: Vec<_> = rows.iter().map(|row| (row.is_compatible, &row.rates[..])).collect();
    let latencies: Vec<_> =
        rows.iter().map(|row| (row.is_compatible, &row.latencies[..])).collect();
    // A closing tag inside the data would end the script element.
    let data = comparison.to_json().to_string().replace("</", "<\\/");
    let environment = &comparison.environment;
    let facts = [
        ("command", environment.argv.join(" ")),
        ("machine", environment.headline()),
        ("load average before", environment.load_average.clone().unwrap_or_default()),
    ];
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Cascade KV cache benchmark, workloads compared" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    header {
                        p.kicker { "The workloads of MLPerf Storage's KV cache benchmark" }
                        h1 { (comparison.headline()) }
                    }
                    h2 { "Rates" }
                    (table(&RATES, &rates))
                    h2 { "Latencies" }
                    (table(&LATENCIES, &latencies))
                    p { (LEGEND) }
                    @for remark in comparison.remarks() {
                        @if remark.contains(": INVALID: ") || remark.contains(": FAILED: ") {
                            p.alarm { (remark) }
                        } @else {
                            p.payload { (remark) }
                        }
                    }
                    (environment_table(&facts, DATA))
                }
                script type="application/json" id=(DATA) { (PreEscaped(data)) }
            }
        }
    };
    page.into_string()
}

fn table(titles: &[&str], rows: &[(bool, &[String])]) -> Markup {
    let first = rows.iter().position(|(is_compatible, _)| *is_compatible);
    html! {
        div.scroll {
            table {
                tr { @for title in titles { th { (title) } } }
                @for (at, (_, cells)) in rows.iter().enumerate() {
                    @if Some(at) == first { tr { th colspan=(titles.len()) { (COMPATIBLE) } } }
                    tr { @for cell in *cells { td { (cell) } } }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::comparison::tests::comparison;

    #[test]
    fn the_page_has_all_rows_and_marks_what_cannot_be_trusted() {
        let page = page(&comparison());
        for part in [
            "<td>gpu-only</td>",
            "<td>2 simulated</td>",
            "<td>0/25/75 %</td>",
            "class=\"alarm\">cpu-only: FAILED: exit code 2",
            "class=\"alarm\">gpu-only, mlperf option 1: INVALID: a reason",
            "id=\"cascade-bench-kv-suite\"",
            "As the original stores and counts",
        ] {
            assert!(page.contains(part), "{part} is not in the page");
        }
        assert!(!page.contains("http"), "it loads nothing");
    }
}
