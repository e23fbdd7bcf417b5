//! The benchmark `gpu`: copies between host memory and a GPU, beside plain copies of the same GPU.

mod copies;
mod hbm;
mod hbm_rows;
mod kernel_check;
mod memory;
mod registration;
mod rows;
mod submit;
mod work;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cascade_device::{
    Context, CudaError, Driver, DriverReport, LIBRARY_VARIABLE, Unavailable, named_library,
};
use cascade_runtime::{Deadline, SystemClock};

use crate::{Bench, Figure, MeasureError, Target};

/// The library of the fake driver, as Cargo names it.
const FAKE_LIBRARY: &str = "libcascade_device_fake.so";
const FAKE_BUILD: &str = "cargo build -p cascade-device-fake";

/// The longest that the GPU may take for one measurement.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// The GPU to measure.
#[derive(Debug, Clone, Copy)]
pub struct GpuOptions {
    /// Its index.
    pub device: usize,
    /// Load the fake driver, to check that the benchmark works.
    pub is_fake: bool,
    /// Never start the kernel: leave out what needs it.
    pub without_kernel: bool,
    /// Leave out the memory tier.
    pub without_hbm: bool,
}

/// A GPU, and the driver that was loaded for it.
#[derive(Debug)]
pub struct Gpu {
    report: DriverReport,
    device: usize,
    without_kernel: bool,
    without_hbm: bool,
    /// The context of the device by this driver, and by the same one without its batched copy.
    context: Arc<Context>,
    unbatched: Arc<Context>,
}

/// What a measurement found beside its figures.
#[derive(Debug, Default)]
pub struct Notes {
    /// Rows that were left out, and why.
    pub not_measured: Vec<String>,
    /// Wrong bytes, and parts that failed.
    pub failures: Vec<String>,
    /// What is right.
    pub findings: Vec<String>,
    /// Why no row uses the kernel, if none does.
    no_kernel: Option<&'static str>,
}

impl Notes {
    fn leave_out(&mut self, row: &str, reason: &str) {
        self.not_measured.push(format!("{row}: {reason}"));
    }
}

impl Gpu {
    /// Loads the driver and takes a context of the device.
    ///
    /// # Errors
    /// [`MeasureError::Measure`] if there is no GPU, which is never measured by guesses;
    /// [`MeasureError::Usage`] for a device that does not exist, or without the fake driver.
    pub fn open(options: GpuOptions) -> Result<Self, MeasureError> {
        let driver =
            if options.is_fake { fake_driver()? } else { Driver::load().map_err(absent)? };
        let report = DriverReport::of(&driver).map_err(absent)?;
        if options.is_fake && !report.is_fake() {
            let library = &report.library;
            return Err(MeasureError::usage(
                format!("--fake, but {LIBRARY_VARIABLE} names the driver {library} of a real GPU"),
                format!("unset it, or let it name {FAKE_LIBRARY} ({FAKE_BUILD})"),
            ));
        }
        let device = options.device;
        if device >= report.devices.len() {
            let names = report.devices.iter().enumerate();
            let names: Vec<_> = names.map(|(at, it)| format!("{at}: {}", it.name)).collect();
            return Err(MeasureError::usage(
                format!("there is no device {device}"),
                format!("--device takes one of: {}", names.join(", ")),
            ));
        }
        let unbatched = driver.without_batched_copy().map_err(absent)?;
        let context = |driver: &Arc<Driver>| {
            Context::retain(driver, device, Arc::new(SystemClock), WAIT_MAX).map_err(failed)
        };
        let (context, unbatched) = (context(&driver)?, context(&unbatched)?);
        let GpuOptions { without_kernel, without_hbm, .. } = options;
        Ok(Self { report, device, without_kernel, without_hbm, context, unbatched })
    }

    /// Whether it is the fake one, whose times mean nothing.
    pub fn is_fake(&self) -> bool {
        self.report.is_fake()
    }

    /// What is measured, in one line above the table.
    pub fn headline(&self) -> String {
        let DriverReport { library, version, .. } = &self.report;
        let name = format!("device {}: {}; {library}, CUDA {version}", self.device, self.name());
        if self.is_fake() {
            return format!(
                "FAKE DRIVER over host memory: these times stand for nothing, least of all for a \
                 GPU ({name})"
            );
        }
        name
    }

    /// Measures all selected figures. A part that fails does not stop the others: what was measured
    /// is kept.
    ///
    /// # Errors
    /// If a figure cannot be delivered.
    pub fn measure(&self, bench: &mut Bench<'_>) -> Result<Notes, MeasureError> {
        let no_kernel = self.without_kernel.then_some("--without-kernel");
        let mut notes = Notes { no_kernel, ..Notes::default() };
        for part in [kernel_check::run, copies::run, submit::run, registration::run, hbm::run] {
            match part(self, bench, &mut notes) {
                Err(error @ MeasureError::Deliver(_)) => return Err(error),
                Err(error) => notes.failures.push(cascade_block::with_causes(&error)),
                Ok(()) => {}
            }
        }
        Ok(notes)
    }

    /// Why a way cannot be used. Fails if the GPU is lost.
    fn reason(&self, error: CudaError) -> Result<String, MeasureError> {
        if error.is_fatal() || self.context.poison().is_some() {
            return Err(failed(error));
        }
        Ok(cascade_block::with_causes(&error))
    }

    fn name(&self) -> &str {
        &self.report.devices[self.device].name
    }

    /// Delivers a figure with the name of the device.
    fn deliver(&self, bench: &mut Bench<'_>, figure: Figure) -> Result<(), MeasureError> {
        bench.deliver(figure.on_device(self.name(), self.is_fake()))
    }

    /// A target, which a fake GPU has not.
    fn target(&self, target: Target) -> Target {
        if self.is_fake() { Target::None } else { target }
    }
}

fn fake_driver() -> Result<Arc<Driver>, MeasureError> {
    let library = match named_library() {
        Some(named) => PathBuf::from(named),
        None => fake_beside_program()?,
    };
    Driver::load_from(&library).map_err(|error| {
        let why = cascade_block::with_causes(&error);
        MeasureError::usage(
            format!("cannot load the fake driver: {why}"),
            format!("build it with {FAKE_BUILD}, and name it in {LIBRARY_VARIABLE}"),
        )
    })
}

fn fake_beside_program() -> Result<PathBuf, MeasureError> {
    let program = std::env::current_exe();
    let program = program.map_err(|error| MeasureError::other("find this program", error))?;
    let library = program.with_file_name(FAKE_LIBRARY);
    if library.exists() {
        return Ok(library);
    }
    let folder = library.parent().unwrap_or(Path::new("/")).display();
    Err(MeasureError::usage(
        format!("there is no fake driver: {FAKE_LIBRARY} is not in {folder}"),
        format!("build it with {FAKE_BUILD}, and name it in {LIBRARY_VARIABLE}"),
    ))
}

/// There is no GPU: nothing is measured.
fn absent(reason: Unavailable) -> MeasureError {
    let what = "a GPU: there is none, so all rows are \"not measured\" (--fake checks the \
                benchmark itself)";
    MeasureError::measure(what, reason)
}

fn failed(error: CudaError) -> MeasureError {
    MeasureError::measure("the GPU", error)
}

fn soon() -> Deadline {
    Deadline::after(&SystemClock, WAIT_MAX)
}
