//! The check of GPUs. A host without one is no worse a host: no outcome here is a failure.

use std::time::Duration;

use cascade_block::ByteSize;
use cascade_device::{LIBRARY, LIBRARY_VARIABLE};

use super::gpu_answer::{GpuAnswer, GpuDevice, GpuReport};
use super::{Check, CheckOutcome};

/// The time limit of the driver's process: less than the doctor's own, so that the answer arrives.
const TIME_LIMIT: Duration = Duration::from_secs(8);

/// The kernel module says here that it is loaded.
const KERNEL_MODULE: &str = "/proc/driver/nvidia/version";

pub(super) const CUDA: Check = Check {
    id: "cuda",
    why: "blocks are copied to and from GPUs through the driver's library; without a GPU all else \
          works",
    run: |_, machine| {
        let has_module = machine.read(KERNEL_MODULE).is_ok();
        match machine.gpus(TIME_LIMIT) {
            GpuAnswer::Found(report) => found(report),
            GpuAnswer::Unavailable { reason, remedy, is_named } => {
                // Somebody installed a part of it.
                if is_named || has_module {
                    CheckOutcome::warning(reason, remedy)
                } else {
                    CheckOutcome { remedy: Some(remedy), ..CheckOutcome::absent(reason) }
                }
            }
            GpuAnswer::Failed(reason) => CheckOutcome::warning(
                format!("the CUDA driver does not work: {reason}"),
                "run nvidia-smi: if it is slow, turn on persistence mode (sudo nvidia-smi -pm 1); \
                 if it hangs or fails, look at dmesg",
            ),
            GpuAnswer::NotAsked => CheckOutcome::absent("the CUDA driver was not asked"),
        }
    },
};

fn found(report: GpuReport) -> CheckOutcome {
    let text = describe(&report);
    let outcome = if report.is_fake {
        let remedy = format!("unset {LIBRARY_VARIABLE}: the fake driver is for tests only");
        CheckOutcome::warning(format!("FAKE driver: {text}"), remedy)
    } else if report.missing_functions.is_empty() {
        CheckOutcome::ok(text)
    } else {
        let remedy = format!("update the driver, or check whose {LIBRARY} is found first");
        CheckOutcome::warning(text, remedy)
    };
    CheckOutcome { gpus: Some(Box::new(report)), ..outcome }
}

/// One line: the driver, its batched copy, what it lacks, and the devices.
fn describe(report: &GpuReport) -> String {
    let devices: Vec<String> = report.devices.iter().enumerate().map(describe_device).collect();
    let batch = report.batched_copy.as_deref().unwrap_or("no batched copy before CUDA 12.8");
    let missing = match &report.missing_functions[..] {
        [] => String::new(),
        missing => format!("; MISSING functions: {}", missing.join(", ")),
    };
    let (library, version) = (&report.library, &report.cuda_version);
    format!("{}; {library}, CUDA {version}, {batch}{missing}", devices.join(", "))
}

fn describe_device((index, device): (usize, &GpuDevice)) -> String {
    let memory = match device.memory_bytes {
        0 => "memory unknown".to_owned(),
        bytes => ByteSize(bytes).rounded(),
    };
    format!("{index}: {} ({memory})", device.name)
}
