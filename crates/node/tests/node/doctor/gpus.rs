//! GPUs: found, absent, or with a driver that does not work. None of these is a failure.

use std::ffi::OsString;
use std::process::Command;
use std::time::Duration;

use cascade_node::doctor::{
    CheckState, Finding, GpuAnswer, GpuReport, Machine as _, Report, ThisMachine,
};
use tempfile::TempDir;

use super::fake_machine::{FakeMachine, gpu_report};
use super::{LIMIT, diagnose, node};

/// The finding about a machine with this answer and no kernel module.
fn finding(answer: GpuAnswer) -> Finding {
    let mut machine = FakeMachine::healthy();
    machine.texts.remove("/proc/driver/nvidia/version");
    machine.gpus = answer;
    finding_of(machine)
}

fn finding_of(machine: FakeMachine) -> Finding {
    let directory = TempDir::new().unwrap();
    let report = diagnose(node(directory.path()), machine);
    assert!(report.is_ready, "a machine without a GPU is ready: {report:#?}");
    cuda(&report)
}

fn cuda(report: &Report) -> Finding {
    report.checks.iter().find(|check| check.id == "cuda").unwrap().clone()
}

fn absent(is_named: bool) -> GpuAnswer {
    let (reason, remedy) = ("cannot load libcuda.so.1".to_owned(), "install it".to_owned());
    GpuAnswer::Unavailable { reason, remedy, is_named }
}

#[test]
fn a_gpu_is_named_with_its_driver_and_memory() {
    let found = finding(GpuAnswer::Found(gpu_report()));
    assert_eq!((found.state, found.remedy), (CheckState::Ok, None));
    assert_eq!(
        found.found,
        "0: NVIDIA H100 80GB HBM3 (80.0 GiB); libcuda.so.1, CUDA 13.0, cuMemcpyBatchAsync_v2"
    );
    assert_eq!(found.gpus, Some(gpu_report()));
}

#[test]
fn a_fake_driver_is_never_mistaken_for_a_gpu() {
    let found =
        finding(GpuAnswer::Found(GpuReport { is_fake: true, batched_copy: None, ..gpu_report() }));
    assert_eq!(found.state, CheckState::Warning);
    assert!(found.found.starts_with("FAKE driver: "), "{found:?}");
    assert!(found.found.contains("no batched copy"), "{found:?}");
    assert!(found.remedy.unwrap().contains("unset CASCADE_CUDA_LIBRARY"));
}

#[test]
fn missing_functions_are_named() {
    let missing_functions = vec!["cuMemcpyBatchAsync_v2".to_owned(), "cuMemMap".to_owned()];
    let report = GpuReport { missing_functions, ..gpu_report() };
    let found = finding(GpuAnswer::Found(report));
    assert_eq!(found.state, CheckState::Warning);
    assert!(found.found.ends_with("MISSING functions: cuMemcpyBatchAsync_v2, cuMemMap"));
    assert!(found.remedy.unwrap().contains("update the driver"));
}

/// Only who installed a part of a driver, or named one, is warned.
#[test]
fn absence_is_ordinary_unless_a_gpu_is_expected() {
    let found = finding(absent(false));
    assert_eq!(found.state, CheckState::Absent);
    assert_eq!(found.found, "cannot load libcuda.so.1");
    assert_eq!(found.remedy.as_deref(), Some("install it"));
    assert_eq!(found.gpus, None);
    assert_eq!(finding(absent(true)).state, CheckState::Warning);
    let machine = FakeMachine { gpus: absent(false), ..FakeMachine::healthy() };
    assert_eq!(finding_of(machine).state, CheckState::Warning, "with a kernel module");
    assert_eq!(finding(GpuAnswer::NotAsked).state, CheckState::Absent);
}

#[test]
fn a_driver_that_does_not_work_is_a_warning() {
    let found = finding(GpuAnswer::Failed("no answer within 8 s".to_owned()));
    assert_eq!(found.state, CheckState::Warning);
    assert!(found.found.contains("does not work: no answer within 8 s"), "{found:?}");
    assert!(found.remedy.unwrap().contains("nvidia-smi"));
}

/// The answer of a machine whose driver is asked by this command.
fn ask(command: &[&str], limit: Duration) -> GpuAnswer {
    let gpu_command = command.iter().map(OsString::from).collect();
    ThisMachine { gpu_command }.gpus(limit)
}

#[test]
fn a_driver_that_hangs_is_killed() {
    let hangs = ask(&["sh", "-c", "exec sleep 1000"], Duration::from_millis(50));
    assert_eq!(hangs, GpuAnswer::Failed("no answer within 0.05 s".to_owned()));
}

#[test]
fn a_driver_that_crashes_ends_only_its_process() {
    let GpuAnswer::Failed(reason) = ask(&["sh", "-c", "kill -SEGV $$"], LIMIT) else {
        panic!("it has no answer");
    };
    assert!(reason.contains("signal: 11"), "{reason}");
}

#[test]
fn an_answer_that_is_none_is_explained() {
    let cases: [(&[&str], &str); 4] = [
        (&["/no/such/program"], "cannot start /no/such/program"),
        (&["false"], "exit status: 1"),
        (&["true"], "printed no answer"),
        (&["echo", "hello"], "printed no answer"),
    ];
    for (command, expected) in cases {
        let GpuAnswer::Failed(reason) = ask(command, LIMIT) else {
            panic!("{command:?} has no answer");
        };
        assert!(reason.contains(expected), "{command:?}: {reason}");
    }
    assert_eq!(ask(&[], LIMIT), GpuAnswer::NotAsked);
}

/// A driver may print lines of its own, and leave a process behind that holds the output open.
#[test]
fn an_answer_is_read_past_what_else_is_printed_and_left_behind() {
    let answer = serde_json::to_string(&GpuAnswer::Found(gpu_report())).unwrap();
    let directory = TempDir::new().unwrap();
    let left = directory.path().join("process");
    let script = "sleep 1000 & echo $! >\"$0\"; echo started; echo \"$1\"";
    let found = ask(&["sh", "-c", script, left.to_str().unwrap(), &answer], LIMIT);
    assert_eq!(found, GpuAnswer::Found(gpu_report()));
    let process = std::fs::read_to_string(left).unwrap();
    let killed = Command::new("kill").arg(process.trim()).status().unwrap();
    assert!(killed.success(), "it was left behind");
}
