//! `cascade bench kv`: files beside its JSON, and files that it replays.

use std::fs;
use std::path::Path;

use serde_json::{Value, json as value};

use crate::kv_bench::{CACHE_STATS, OURS, Run, SUMMARY, TOP, has_keys};
use crate::stderr;

#[test]
fn results_are_written_as_a_spreadsheet_and_as_csv() {
    let run = Run::new();
    for (name, written) in [("new/a.xlsx", "new/a.xlsx"), ("b.csv", "b.csv"), ("c", "c.csv")] {
        let path = run.path(name);
        let options = ["--max-requests", "2", "--xlsx-output", path.to_str().unwrap()];
        let (output, result) = run.run(&options);
        let written = run.path(written);
        assert!(stderr(&output).contains(written.to_str().unwrap()), "{}", stderr(&output));
        let bytes = fs::read(written).unwrap();
        if bytes.starts_with(b"PK") {
            assert_eq!(name, "new/a.xlsx");
            let text = String::from_utf8_lossy(&bytes);
            let sheets = ["Summary", "Run Parameters", "Performance Metrics", "QoS Metrics"];
            for part in sheets.into_iter().chain(["Validity", "unoptimised", "tiny-1b"]) {
                assert!(text.contains(part), "no {part}");
            }
            continue;
        }
        let text = String::from_utf8(bytes).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        let columns: Vec<&str> = lines[0].split(',').collect();
        let value = |column: &str| {
            let at = columns.iter().position(|it| *it == column).unwrap();
            lines[1].split(',').nth(at).unwrap()
        };
        assert_eq!(columns.len(), lines[1].split(',').count());
        assert_eq!((value("Model"), value("Num Users"), value("Seed")), ("tiny-1b", "4", "42"));
        assert_eq!((value("Multi-turn"), value("Total Requests")), ("True", "2"));
        let read = &result["summary"]["cache_stats"]["total_read_gb"];
        assert_eq!(value("Total Read (GiB)"), read.to_string());
    }
}

/// The rows of a log without their times.
fn logged_rows(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| line.split_once(',').unwrap().1.to_owned()).collect()
}

/// Nothing is stored, so that neither a disk nor memory for the model is needed.
#[test]
fn operations_are_logged_and_nothing_is_measured() {
    let logs = [0, 1].map(|_| {
        let run = Run::new();
        let log = run.path("new/log.csv");
        let (output, result) = run.run(&[
            "--compatible",
            "--max-requests",
            "40",
            "--cpu-mem-gb",
            "100000",
            "--storage-capacity-gb",
            "100000",
            "--io-trace-log",
            log.to_str().unwrap(),
        ]);
        has_keys(&result, TOP);
        has_keys(&result["summary"], SUMMARY);
        has_keys(&result["summary"]["cache_stats"], CACHE_STATS);
        has_keys(&result["cascade"], OURS);
        assert_eq!((&result["requests_completed"], &result["seed"]), (&40.into(), &42.into()));
        let rows = logged_rows(&log);
        assert_eq!(rows[0], "Operation,Object_Size_Bytes,Tier,Key,Phase");
        assert_eq!(result["cascade"]["io_trace_log"]["rows"], rows.len() - 1);
        for part in [
            "/summary/end_to_end_latency_ms/p95",
            "/summary/requests_per_second",
            "/summary/cache_stats/tier_cpu_read_bandwidth_gbps",
            "/summary/cache_stats/storage_health/overall_status",
            "/summary/qos_metrics/batch/sla/actual_p95_ms",
            "/cascade/rates/read_gib_per_second",
            "/cascade/cpu/seconds",
        ] {
            assert_eq!(result.pointer(part), Some(&Value::Null), "{part}");
        }
        let validity = &result["cascade"]["validity"];
        assert_eq!(validity["reasons"][0]["code"], "nothing_stored", "{validity}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("Nothing was stored and nothing was read"), "{text}");
        assert!(text.contains("Tier-1 (CPU): 40 writes"), "{text}");
        assert!(!text.contains("GiB/s") && !text.contains("P95"), "{text}");
        assert!(!run.path("cache").exists());
        rows
    });
    assert_eq!(logs[0], logs[1]);
    assert!(logs[0].len() > 100, "{}", logs[0].len());
}

#[test]
fn a_log_that_makes_no_sense_is_refused_and_a_full_disk_ends_it() {
    let run = Run::new();
    let log = ["--io-trace-log", "out.csv"];
    let store = run.refusal(&log);
    assert!(store.contains("only --compatible stores those"), "{store}");
    let screen = run.refusal(&["--compatible", "--io-trace-log", "-"]);
    assert!(screen.contains("needs the name of a file"), "{screen}");
    for option in [&["--keep"][..], &["--no-verify"], &["--report", "x.html"]] {
        let refused = run.refusal(&[&["--compatible"], &log[..], option].concat());
        assert!(refused.contains(&format!("{} has no effect", option[0])), "{refused}");
    }
    let endless = ["--compatible", "--duration", "86400", "--io-trace-log", "/dev/full"];
    let output = run.command(&endless).output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("cannot write /dev/full") && text.contains("free space"), "{text}");
    assert!(!run.path("out.json").exists());
}

/// Each row is an entry of its own. Failed requests are replayed, as in the original.
#[test]
fn compatible_mode_replays_a_trace() {
    let run = Run::new();
    let trace = run.path("burst.csv");
    fs::write(&trace, "Timestamp,Request tokens,Response tokens\n5,600,70\n6,900,0\n").unwrap();
    let (output, result) = run.run(&[
        "--compatible",
        "--disable-prefix-caching",
        "--use-burst-trace",
        "--burst-trace-path",
        trace.to_str().unwrap(),
        "--trace-speedup",
        "0",
        "--replay-cycles",
        "3",
    ]);
    assert!(stderr(&output).contains("2 requests, all due at once"), "{}", stderr(&output));
    assert_eq!(result["requests_completed"], 6);
    let cache = &result["summary"]["cache_stats"];
    let entry = |tokens: u64| tokens * 24_576 / 8;
    assert_eq!(cache["total_write_bytes"], 3 * (entry(600) + entry(900)));
    // One read, and one more for 32 tokens, but at least one.
    assert_eq!(cache["total_read_bytes"], 3 * (4 * entry(600) + 2 * entry(900)));
    let recorded = &result["cascade"]["workload"]["recorded"];
    assert_eq!((&recorded["rows_read"], &recorded["rows_skipped"]), (&2.into(), &value!({})));
}
