//! The driver is found, or its absence explained; and it is refused after a fork.

#![expect(unsafe_code, reason = "forks")]

use std::error::Error as _;
use std::path::Path;
use std::sync::Arc;

use cascade_block::with_causes;
use cascade_device::{
    BatchForm, CudaError, CudaMemory, CudaMemoryConfig, Driver, DriverReport, Unavailable,
};
use cascade_memory::{DeviceError, DeviceMemory as _};
use cascade_runtime::SystemClock;

use crate::fake::{self, assert_nothing_left, command, count, finish, is_child};

#[test]
fn a_report_names_the_driver_and_says_fake() {
    if !is_child("a_report_names_the_driver_and_says_fake", &[("FAKE_CUDA_DEVICES", "2")]) {
        return;
    }
    let report = DriverReport::examine().unwrap();
    assert!(report.is_fake());
    assert_eq!(report.version.to_string(), "13.0");
    assert_eq!(report.devices.len(), 2);
    let device = &report.devices[0];
    assert!(device.name.contains("fake"), "{device:?}");
    assert_eq!((device.memory_bytes, device.capability), (1 << 30, [9, 0]));
    assert_eq!(device.uuid, "GPU-fafafafa-fafa-fafa-fafa-fafafafafafa");
    assert_eq!(device.pci_address, "0000:FA:CE.0");
    assert_eq!(report.missing_functions, [""; 0]);
    assert_eq!(report.batch, Some(BatchForm::WithoutIndex));
    assert_eq!(count("cuDevicePrimaryCtxRetain"), 0, "a report creates no context");
}

/// Variables, and what the message has to say: the reason, and what to do.
type Absence = (&'static [(&'static str, &'static str)], &'static str, &'static str);

/// The state of a process without a driver, in each of its forms.
#[test]
fn absence_is_explained_with_what_to_do() {
    let absences: [Absence; 8] = [
        (&[("CASCADE_CUDA_LIBRARY", "/no/such/library")], "no/such/library", "--gpus all"),
        (&[("CASCADE_CUDA_LIBRARY", "/proc/version")], "/proc/version", "--gpus all"),
        (&[("FAKE_CUDA_DEVICES", "0")], "finds no device", "nvidia-smi"),
        (&[("FAKE_CUDA_VERSION", "10020")], "CUDA 10.2", "update the driver"),
        (&[("FAKE_CUDA_FAIL", "cuInit=803")], "(803)", "reboot"),
        (&[("FAKE_CUDA_FAIL", "cuInit=3")], "NOT_INITIALIZED (3)", "`spawn`"),
        (&[("FAKE_CUDA_ABSENT", "cuInit")], "has no cuInit", "update the driver"),
        (&[("FAKE_CUDA_FAIL", "cuDriverGetVersion=999")], "(999)", "dmesg"),
    ];
    for (variables, reason, remedy) in absences {
        let child = command("absence_in_a_child", variables).spawn().unwrap();
        let (succeeded, text) = finish(child);
        assert!(succeeded, "{variables:?}: {text}");
        assert!(text.contains(reason) && text.contains(remedy), "{variables:?}: {text}");
    }
}

#[test]
fn absence_in_a_child() {
    if fake::variable("FAKE_CUDA_TEST").as_deref() == Some("absence_in_a_child") {
        let absence = Driver::load().expect_err("no driver");
        assert_eq!(DriverReport::examine().expect_err("again"), absence);
        let mut out = std::io::stdout().lock();
        std::io::Write::write_all(&mut out, with_causes(&absence).as_bytes()).unwrap();
    }
}

/// The version of a driver decides the form of its batched copy, whatever it exports.
#[test]
fn the_version_decides_the_form_of_the_batch() {
    let versions = [
        ("11000", "none"),
        ("12040", "none"),
        ("12080", "cuMemcpyBatchAsync"),
        ("12090", "cuMemcpyBatchAsync"),
        ("13000", "cuMemcpyBatchAsync_v2"),
        ("13030", "cuMemcpyBatchAsync_v2"),
    ];
    for (version, form) in versions {
        let variables = [("FAKE_CUDA_VERSION", version), ("EXPECTED_FORM", form)];
        let child = command("the_form_in_a_child", &variables).spawn().unwrap();
        let (succeeded, text) = finish(child);
        assert!(succeeded, "{version}: {text}");
    }
}

/// For comparisons: one call for each copy, beside the same driver with its batches.
#[test]
fn a_driver_without_its_batched_copy_leaves_the_other_one_its_own() {
    if !is_child("a_driver_without_its_batched_copy_leaves_the_other_one_its_own", &[]) {
        return;
    }
    let driver = Driver::load_from(fake::library()).unwrap();
    let unbatched = driver.without_batched_copy().unwrap();
    assert_eq!(BatchForm::of(&unbatched), None);
    assert_eq!(BatchForm::of(&driver), Some(BatchForm::WithoutIndex));
    assert_eq!(DriverReport::of(&unbatched).unwrap().devices.len(), 1);
}

#[test]
fn the_form_in_a_child() {
    let Some(expected) = fake::variable("EXPECTED_FORM") else { return };
    let driver = Driver::load().unwrap();
    let form = BatchForm::of(&driver).map_or("none".to_owned(), |form| form.to_string());
    assert_eq!(form, expected);
    assert_eq!(driver.missing_functions(), [""; 0], "what is newer is not missing");
}

/// A library without `cuGetProcAddress_v2`, as drivers before CUDA 12.0 are, and one function less.
/// The names are changed in copies of the fake, so that the loader cannot find them.
#[test]
fn functions_are_found_by_their_exported_names_in_old_drivers() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(fake::library()).unwrap();
    let works = "";
    let cases = [
        (works, ""),
        ("cuInit", "has no cuInit"),
        ("cuDriverGetVersion", "has no cuDriverGetVersion"),
        ("cuDeviceGetCount", "has no cuDeviceGetCount"),
        ("cuMemAlloc_v2", "has no cuMemAlloc_v2"),
        ("cuEventQuery", "has no cuEventQuery"),
        ("cuCtxPopCurrent_v2", "has no cuCtxPopCurrent_v2"),
    ];
    for (absent, reason) in cases {
        let path = directory.path().join(format!("libcuda-without-{absent}.so"));
        std::fs::write(&path, without(&without(&bytes, "cuGetProcAddress_v2"), absent)).unwrap();
        let path = path.to_str().unwrap();
        let variables = [("CASCADE_CUDA_LIBRARY", path), ("FAKE_CUDA_VERSION", "11080")];
        let child = command("memory_in_a_child", &variables).spawn().unwrap();
        let (succeeded, text) = finish(child);
        assert!(succeeded, "without {absent}: {text}");
        let expected = if reason.is_empty() { "it works" } else { reason };
        assert!(text.contains(expected), "without {absent}: {text}");
    }
}

/// A copy of a library in which a function has another name.
fn without(library: &[u8], name: &str) -> Vec<u8> {
    let mut library = library.to_vec();
    let pattern = format!("\0{name}\0").into_bytes();
    if !name.is_empty() {
        let places = library.windows(pattern.len()).enumerate();
        let places: Vec<usize> =
            places.filter(|(_, bytes)| *bytes == pattern).map(|(at, _)| at).collect();
        assert!(!places.is_empty(), "the fake exports {name}");
        for at in places {
            library[at + 1] = b'x';
        }
    }
    library
}

fn works() -> Result<(), CudaError> {
    DriverReport::examine()?;
    let driver = Driver::load()?;
    let config = CudaMemoryConfig::new(1 << 20);
    let memory = CudaMemory::new(&driver, &config, Arc::new(SystemClock))?;
    let mut bytes = [0; 100];
    let copied = memory.copy_in(5, &[7; 100]).and_then(|()| memory.copy_out(5, &mut bytes));
    assert!(copied.is_ok() && bytes == [7; 100], "{copied:?}");
    Ok(())
}

#[test]
fn memory_in_a_child() {
    if fake::variable("FAKE_CUDA_TEST").as_deref() == Some("memory_in_a_child") {
        let found = works().map_or_else(|error| with_causes(&error), |()| "it works".to_owned());
        let mut out = std::io::stdout().lock();
        std::io::Write::write_all(&mut out, found.as_bytes()).unwrap();
    }
}

/// A fork leaves the driver's threads behind: the child must not call it, not even to release.
#[test]
fn a_forked_child_is_refused_and_its_parent_goes_on() {
    if !is_child("a_forked_child_is_refused_and_its_parent_goes_on", &[]) {
        return;
    }
    let driver = Driver::load().unwrap();
    let config = CudaMemoryConfig::new(1 << 20);
    let memory = CudaMemory::new(&driver, &config, Arc::new(SystemClock)).unwrap();
    memory.copy_in(0, &[1; 4096]).unwrap();
    // SAFETY: the child only calls what is tested here, and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "a process can be created");
    if child == 0 {
        // SAFETY: ends a child that waits, with an error.
        unsafe { libc::alarm(60) };
        let copied = memory.copy_in(0, &[2; 4096]);
        let is_refused = matches!(&copied, Err(DeviceError::Failed { source, .. })
            if source.to_string().contains("`spawn` instead of `fork`"));
        let is_refused = is_refused && matches!(Driver::load(), Err(Unavailable::Forked));
        drop(memory);
        drop(driver);
        // SAFETY: ends the child without the parent's handlers.
        unsafe { libc::_exit(i32::from(!is_refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child from above and writes to a local variable.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child was refused without a signal");
    let mut bytes = [0; 4096];
    memory.copy_out(0, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 4096]);
    drop(memory);
    assert_nothing_left();
}

/// `/proc/self/mem` and plain instructions alike: an address of the device is not one of the host.
#[test]
fn an_instruction_that_follows_an_address_of_the_device_ends_the_process() {
    if !is_child("an_instruction_that_follows_an_address_of_the_device_ends_the_process", &[]) {
        return;
    }
    for shareable in [false, true] {
        let driver = Driver::load().unwrap();
        let config = CudaMemoryConfig { shareable, ..CudaMemoryConfig::new(1 << 20) };
        let memory = CudaMemory::new(&driver, &config, Arc::new(SystemClock)).unwrap();
        assert_ends_reader(usize::try_from(memory.base()).unwrap());
    }
}

fn assert_ends_reader(base: usize) {
    assert!(base.is_multiple_of(4096));
    // SAFETY: the child does nothing but read a byte and end.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "a process can be created");
    if child == 0 {
        // SAFETY: restores the kernel's own action.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
        let address = std::ptr::with_exposed_provenance::<u8>(base);
        // SAFETY: this read is what the test is about: the kernel ends the child.
        let byte = unsafe { address.read_volatile() };
        // SAFETY: ends the child without the parent's handlers.
        unsafe { libc::_exit(i32::from(byte)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child from above and writes to a local variable.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFSIGNALED(status), "the child read {status:#x}");
    assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV);
}

#[test]
fn errors_name_call_code_and_remedy() {
    if !is_child("errors_name_call_code_and_remedy", &[("FAKE_CUDA_BYTES", "1000000")]) {
        return;
    }
    assert!(Path::new(&fake::library()).exists());
    let driver = Driver::load().unwrap();
    let error = CudaMemory::new(&driver, &CudaMemoryConfig::new(1 << 20), Arc::new(SystemClock));
    let error = error.expect_err("more than the device has");
    assert!(error.source().is_none());
    assert_eq!(
        error.to_string(),
        "cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2); free memory of the GPU, or make the \
         pool on it smaller"
    );
    let none = CudaMemoryConfig { device: 3, ..CudaMemoryConfig::new(1 << 20) };
    let error = CudaMemory::new(&driver, &none, Arc::new(SystemClock)).expect_err("no device 3");
    assert!(error.to_string().contains("CUDA_ERROR_INVALID_DEVICE (101)"), "{error}");
    assert_nothing_left();
}
