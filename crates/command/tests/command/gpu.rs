//! GPUs as users see them, over the fake driver and without one.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::{cascade, stderr};

/// The fake driver, which Cargo builds beside the tests.
fn fake_driver() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libcascade_device_fake.so")
}

/// The command with this driver, and without variables of the process that runs the tests.
fn cascade_with(driver: &str) -> Command {
    let mut command = cascade();
    command.env("CASCADE_CUDA_LIBRARY", driver);
    command
}

fn cascade_with_fake() -> Command {
    cascade_with(fake_driver().to_str().unwrap())
}

/// The finding about GPUs, and what was printed.
fn examine(mut command: Command) -> (Value, Output) {
    let directory = tempfile::TempDir::new().unwrap();
    command.args(["doctor", "--json", "--socket"]).arg(directory.path().join("cascade.sock"));
    let output = command.output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    (checks.iter().find(|check| check["id"] == "cuda").unwrap().clone(), output)
}

#[test]
fn the_doctor_names_the_driver_and_its_devices() {
    let mut command = cascade_with_fake();
    command.env("FAKE_CUDA_DEVICES", "2").env("FAKE_CUDA_ABSENT", "cuMemMap");
    let (found, output) = examine(command);
    assert_eq!(stderr(&output), "", "no warning about the variable");
    assert_eq!(found["state"], "warning", "{found}");
    assert!(found["found"].as_str().unwrap().starts_with("FAKE driver: 0: fake GPU"), "{found}");
    assert!(found["remedy"].as_str().unwrap().contains("CASCADE_CUDA_LIBRARY"), "{found}");
    let gpus = &found["gpus"];
    assert_eq!(gpus["is_fake"], true, "{gpus}");
    assert_eq!(gpus["library"], fake_driver().to_str().unwrap());
    assert_eq!(gpus["cuda_version"], "13.0");
    assert_eq!(gpus["batched_copy"], "cuMemcpyBatchAsync_v2");
    assert_eq!(gpus["missing_functions"], json!(["cuMemMap"]));
    assert_eq!(
        gpus["devices"][1],
        json!({
            "name": "fake GPU of cascade (host memory)",
            "uuid": "GPU-fafafafa-fafa-fafa-fafa-fafafafafafb",
            "pci_address": "0000:FA:CE.0",
            "memory_bytes": 1_u64 << 30,
            "compute_capability": "9.0",
        })
    );
    assert_eq!(gpus["devices"].as_array().unwrap().len(), 2);
}

#[test]
fn the_doctor_explains_why_there_is_no_gpu() {
    let (found, _) = examine(cascade_with("/no/such/driver.so"));
    assert_eq!((&found["state"], &found["gpus"]), (&json!("warning"), &Value::Null), "{found}");
    let reason = found["found"].as_str().unwrap();
    assert!(reason.contains("cannot load the CUDA driver /no/such/driver.so"), "{reason}");
    assert!(found["remedy"].as_str().unwrap().contains("--gpus all"), "{found}");
    let mut command = cascade_with_fake();
    command.env("FAKE_CUDA_FAIL", "cuInit=803");
    let (found, _) = examine(command);
    assert!(found["found"].as_str().unwrap().contains("(803)"), "{found}");
    assert!(found["remedy"].as_str().unwrap().contains("reboot"), "{found}");
}

/// Runs the benchmark over the fake driver with these variables; the figures, if it wrote some.
fn bench_fake(args: &[&str], variables: &[(&str, &str)]) -> (Output, Option<Vec<Value>>) {
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("gpu.json");
    let mut command = cascade_with_fake();
    command.args(["bench", "gpu", "--unoptimised", "--fake", "--json"]).arg(&path).args(args);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let figures = path.exists().then(|| crate::json(&path).as_array().unwrap().clone());
    (output, figures)
}

fn names(figures: &[Value]) -> Vec<&str> {
    figures.iter().map(|figure| figure["name"].as_str().unwrap()).collect()
}

#[test]
fn every_figure_of_a_fake_gpu_is_measured_and_says_fake() {
    let (output, figures) = bench_fake(&[], &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let figures = figures.unwrap();
    let found: BTreeSet<&str> = names(&figures).into_iter().collect();
    assert_eq!(found.len(), figures.len(), "names are unique: {found:?}");
    for name in [
        "plain/to-device/8MiB",
        "plain/to-host/8MiB",
        "to-device/4KiB/x1024/batch",
        "to-host/16KiB/x128/single",
        "both/2MiB/x2/batch",
        "to-device/16KiB/x128/direct",
        "to-host/16KiB/x128/staged",
        "both/64KiB/x16/mapped",
        "to-device/4KiB/x1024/chosen",
        "kernel-check/to-device/mapped",
        "kernel-check/to-device/staged",
        "kernel-check/to-host/mapped",
        "kernel-check/to-host/staged",
        "cpu/copy/direct",
        "cpu/copy/staged",
        "cpu/copy/mapped",
        "hbm/put/64KiB/x16/direct",
        "hbm/get/4KiB/x1024/single",
        "hbm/get/2MiB/x1/mapped",
        "plain/on-device/8MiB",
        "cpu/submit",
        "cpu/copy/batch",
        "cpu/copy/single",
        "registration/4KiB-pages",
    ] {
        assert!(found.contains(name), "{name} is missing: {found:?}");
    }
    for figure in &figures {
        let number = |field: &str| figure[field].as_f64();
        assert_eq!(figure["fake"], true, "{figure}");
        assert_eq!(figure["device"], "fake GPU of cascade (host memory)");
        assert_eq!((&figure["target"], &figure["is_reached"]), (&json!("none"), &Value::Null));
        let is_check = figure["name"].as_str().unwrap().starts_with("kernel-check/");
        let samples = figure["samples"].as_array().unwrap().len();
        assert!(samples >= 5 || is_check, "{figure}");
        let (name, value) = (figure["name"].as_str().unwrap(), number("value").unwrap());
        let has_limit = ["plain/", "cpu/", "kernel-check/", "hbm/get/2MiB/x1/"]
            .iter()
            .all(|it| !name.starts_with(it));
        let has_share = number("limit").zip(number("share")).map(|(limit, share)| {
            let expected = if figure["unit"] == "GiB/s" { value / limit } else { limit / value };
            assert!((share / expected - 1.0).abs() < 1e-9, "{expected}: {figure}");
        });
        assert_eq!(has_share.is_some(), has_limit, "{figure}");
    }
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("FAKE DRIVER over host memory: these times stand for nothing"));
    let rows = table.lines().filter(|line| line.ends_with("  FAKE")).count();
    assert_eq!(rows, figures.len(), "{table}");
    assert!(table.contains("the kernel's results are right: "), "{table}");
    assert!(table.contains("(FAKE driver: not the kernel of a GPU)"), "{table}");
    planned_rows_name_their_ways(&figures);
}

/// Rows of plans say by which ways, and those of one direction how long it should have taken.
fn planned_rows_name_their_ways(figures: &[Value]) {
    for figure in figures {
        let name = figure["name"].as_str().unwrap();
        let way = name.rsplit('/').next().unwrap();
        let is_planned = ["direct", "staged", "mapped", "chosen"].contains(&way)
            && !name.starts_with("cpu/")
            && !name.starts_with("hbm/")
            && !name.starts_with("kernel-check/");
        assert_eq!(figure.get("ways").is_some(), is_planned, "{figure}");
        if !is_planned {
            continue;
        }
        if way != "chosen" {
            assert_eq!(figure["ways"], json!([way]), "{figure}");
        }
        let number = |field: &str| figure[field].as_f64();
        let is_both = name.starts_with("both/");
        assert_eq!(number("predicted").is_none(), is_both, "{figure}");
        if let Some((predicted, error)) = number("predicted").zip(number("time_error")) {
            let expected = number("value").unwrap() / predicted - 1.0;
            assert!((error - expected).abs() < 1e-9, "{figure}");
        }
    }
}

/// A kernel that copies wrong bytes is found before its ways are measured, and the rest is kept.
#[test]
fn a_wrong_kernel_is_found_and_not_measured() {
    let wrong = [("FAKE_CUDA_SPOIL_LENGTH", "98")];
    let (output, figures) = bench_fake(&["--only", "to-host/"], &wrong);
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    assert!(message.contains("kernel-check/to-host/mapped: WRONG BYTES: byte 0 "), "{message}");
    assert!(message.contains("of a fragment of 98 bytes is Some(165)"), "{message}");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(!table.contains("are right"), "{table}");
    let left_out = "not measured: to-host/4KiB/x16/staged: the kernel copies wrong bytes";
    assert!(table.contains(left_out), "{table}");
    let figures = figures.unwrap();
    let found = names(&figures);
    assert!(found.contains(&"to-host/4KiB/x16/direct"), "{found:?}");
    assert!(!found.iter().any(|name| name.ends_with("/chosen") || name.ends_with("/mapped")));
}

/// Wrong bytes of a length that the check has not: the row is no figure, and those before are kept.
#[test]
fn wrong_bytes_of_a_row_are_a_failure() {
    for way in ["staged", "mapped"] {
        let wrong = [("FAKE_CUDA_SPOIL_LENGTH", "262144")];
        let (output, figures) =
            bench_fake(&["--without-hbm", "--only", &format!("/x16/{way}")], &wrong);
        assert_eq!(output.status.code(), Some(1));
        let message = stderr(&output);
        let wrong = format!("to-device/256KiB/x16/{way}: WRONG BYTES in fragment");
        assert!(message.replace("cannot measure ", "").contains(&wrong), "{message}");
        let figures = figures.unwrap();
        assert!(names(&figures).contains(&&*format!("to-device/64KiB/x16/{way}")));
        assert!(!names(&figures).iter().any(|name| name.contains("256KiB")), "{figures:?}");
    }
}

/// The kernel copies pieces of 4 KiB here, a length that its check has not.
#[test]
fn wrong_bytes_of_the_memory_tier_are_a_failure() {
    let wrong = [("FAKE_CUDA_SPOIL_LENGTH", "4096")];
    for direction in ["put", "get"] {
        let shape = format!("hbm/{direction}/64KiB/x16/");
        let (output, figures) = bench_fake(&["--only", &shape], &wrong);
        assert_eq!(output.status.code(), Some(1));
        let message = stderr(&output);
        assert!(message.contains(&format!("{shape}mapped: WRONG BYTES in fragment")), "{message}");
        assert_eq!(names(&figures.unwrap()), ["plain/on-device/8MiB"]);
    }
}

#[test]
fn the_memory_tier_of_another_gpu_is_measured_if_this_one_can_access_it() {
    let rows = ["--only", "hbm-peer/get/4KiB/x16/"];
    let peers = [("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_PEERS", "1")];
    let (output, figures) = bench_fake(&rows, &peers);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let plain = ["plain/to-peer/8MiB", "plain/from-peer/8MiB"].map(str::to_owned);
    let ways = ["direct", "single", "mapped"].map(|way| format!("hbm-peer/get/4KiB/x16/{way}"));
    assert_eq!(names(&figures.unwrap()), [&plain[..], &ways].concat());
    let reasons = [("1", "there is no second GPU"), ("2", "cannot access")];
    for (devices, reason) in reasons {
        let (output, figures) = bench_fake(&rows, &[("FAKE_CUDA_DEVICES", devices)]);
        assert_eq!((output.status.code(), figures), (Some(1), None));
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    }
}

#[test]
fn the_kernel_can_be_left_alone() {
    let (output, figures) = bench_fake(&["--without-kernel", "--only", "/16KiB/x16/"], &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let figures = figures.unwrap();
    let tier = figures.iter().filter(|it| it["name"].as_str().unwrap().starts_with("hbm/")).count();
    assert_eq!(tier, 4, "two ways in two directions: {:?}", names(&figures));
    let rest = figures.len() - tier - 1;
    assert_eq!(rest, 9, "three ways in three directions: {:?}", names(&figures));
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("not measured: both/16KiB/x16/chosen: --without-kernel"), "{table}");
    assert!(!table.contains("kernel's results"), "{table}");
}

#[test]
fn ways_with_a_kernel_are_left_out_where_the_driver_has_none() {
    let none = [("FAKE_CUDA_ABSENT", "cuLaunchKernel")];
    let (output, figures) = bench_fake(&["--only", "to-device/16KiB/x16/"], &none);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let expected = ["batch", "single", "direct"].map(|way| format!("to-device/16KiB/x16/{way}"));
    assert_eq!(names(&figures.unwrap()), expected);
    let table = String::from_utf8(output.stdout).unwrap();
    for way in ["staged", "mapped", "chosen"] {
        let line = format!("not measured: to-device/16KiB/x16/{way}: the CUDA driver has no cuLa");
        assert!(table.contains(&line), "{table}");
    }
}

#[test]
fn without_a_gpu_nothing_is_measured() {
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("gpu.json");
    let mut command = cascade_with("/no/such/driver.so");
    let output =
        command.args(["bench", "gpu", "--unoptimised", "--json"]).arg(&path).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    for part in ["\"not measured\"", "/no/such/driver.so", "install the NVIDIA driver"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let text = String::from_utf8(output.stdout).unwrap();
    let is_warning = |line: &str| line.starts_with("unoptimised build");
    assert!(text.lines().all(is_warning) && !path.exists(), "no figure was made up: {text}");
}

#[test]
fn a_device_that_does_not_exist_is_refused_with_those_that_do() {
    let (output, figures) = bench_fake(&["--device", "3"], &[("FAKE_CUDA_DEVICES", "2")]);
    assert_eq!((output.status.code(), figures), (Some(2), None));
    let message = stderr(&output);
    assert!(message.contains("there is no device 3"), "{message}");
    assert!(message.contains("1: fake GPU of cascade"), "{message}");
}

/// A driver before CUDA 12.8.
#[test]
fn batches_are_not_measured_with_a_driver_that_has_none() {
    let old = [("FAKE_CUDA_VERSION", "12040")];
    let (output, figures) = bench_fake(&["--only", "to-host/4KiB/x16/"], &old);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let figures = figures.unwrap();
    assert!(names(&figures).contains(&"to-host/4KiB/x16/single"));
    assert!(!names(&figures).contains(&"to-host/4KiB/x16/batch"));
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("not measured: to-host/4KiB/x16/batch: the driver has no"), "{table}");
    let (output, figures) = bench_fake(&["--only", "to-host/4KiB/x16/batch"], &old);
    assert_eq!((output.status.code(), figures), (Some(1), None));
    assert!(stderr(&output).contains("no batched copy"), "{}", stderr(&output));
}

#[test]
fn a_missing_fake_driver_is_explained_with_how_to_build_it() {
    // A program without the library beside it.
    let directory = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = directory.path().join("cascade");
    std::fs::hard_link(env!("CARGO_BIN_EXE_cascade"), &program).unwrap();
    let mut command = Command::new(program);
    command.args(["bench", "gpu", "--unoptimised", "--fake"]).env_remove("CASCADE_CUDA_LIBRARY");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let message = stderr(&output);
    assert!(message.contains("cargo build -p cascade-device-fake"), "{message}");
    // Some other library is no driver.
    let mut command = cascade_with("/proc/version");
    let output = command.args(["bench", "gpu", "--unoptimised", "--fake"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("cannot load the fake driver"), "{}", stderr(&output));
}
