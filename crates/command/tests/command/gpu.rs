//! GPUs as users see them, over the fake driver and without one.

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
            "uuid": "GPU-fafafafa-fafa-fafa-fafa-fafafafafafa",
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
