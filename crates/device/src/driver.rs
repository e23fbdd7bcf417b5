//! The driver of this process: its library, version and functions.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cascade_memory::process_mark;

use crate::error::{CallError, CudaError, NO_DEVICE, SUCCESS, Unavailable, known_name};
use crate::functions::{Function, Functions, Status, Symbol};
use crate::library::{Library, library_name};
use crate::version::DriverVersion;

/// The oldest driver: CUDA 11.0, the first that loads PTX 7.0.
const VERSION_MIN: DriverVersion = DriverVersion(11_000);

/// The process that has started the driver, by its mark; zero if none has.
static STARTED_BY: AtomicU64 = AtomicU64::new(0);

/// `cuGetProcAddress_v2`, which finds all other functions.
type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> Status;

/// The driver, started.
#[derive(Debug)]
pub struct Driver {
    pub(crate) functions: Functions,
    version: DriverVersion,
    library: String,
    /// The mark of the process that started it.
    process: u64,
    /// Releases that the driver refused: what they should have freed is held until the process
    /// ends.
    failed_releases: AtomicU64,
}

impl Driver {
    /// Loads and starts the driver that `CASCADE_CUDA_LIBRARY` names, or `libcuda.so.1`.
    ///
    /// # Errors
    /// If there is no driver, no device, or one that does not start.
    pub fn load() -> Result<Arc<Self>, Unavailable> {
        Self::load_from(library_name())
    }

    /// Loads and starts the driver in this library.
    ///
    /// # Errors
    /// As [`Driver::load`].
    pub fn load_from(library: impl Into<OsString>) -> Result<Arc<Self>, Unavailable> {
        Self::open(library.into()).map(Arc::new)
    }

    /// The same driver once more, without its batched copy: copiers of its contexts make one call
    /// for each copy.
    ///
    /// # Errors
    /// As [`Driver::load`].
    pub fn without_batched_copy(&self) -> Result<Arc<Self>, Unavailable> {
        let mut driver = Self::open(self.library().into())?;
        driver.functions.memcpy_batch.pointer = None;
        driver.functions.memcpy_batch_with_index.pointer = None;
        Ok(Arc::new(driver))
    }

    fn open(name: OsString) -> Result<Self, Unavailable> {
        let process = process_mark();
        if ![0, process].contains(&STARTED_BY.load(Ordering::SeqCst)) {
            return Err(Unavailable::Forked);
        }
        let library = name.to_string_lossy().into_owned();
        let no_library = |reason| Unavailable::NoLibrary { library: library.clone(), reason };
        let functions = find_functions(&Library::open(name).map_err(no_library)?);
        let failed_releases = AtomicU64::new(0);
        let version = DriverVersion(0);
        let mut driver = Self { functions, version, library, process, failed_releases };
        driver.read_version()?;
        driver.start()?;
        STARTED_BY.store(process, Ordering::SeqCst);
        Ok(driver)
    }

    fn read_version(&mut self) -> Result<(), Unavailable> {
        let mut version = 0;
        let function = self.functions.driver_get_version;
        // SAFETY: writes to a local variable. It works before the driver is started.
        let read = self.run(&function, |read| unsafe { read(&raw mut version) });
        read.map_err(|error| self.unavailable(error))?;
        self.version = DriverVersion(version);
        if self.version < VERSION_MIN {
            let (library, found) = (self.library.clone(), self.version);
            return Err(Unavailable::TooOld { library, found, needed: VERSION_MIN });
        }
        Ok(())
    }

    fn start(&self) -> Result<(), Unavailable> {
        // SAFETY: its argument has to be zero. It may be called any number of times.
        let started = self.run(&self.functions.init, |start| unsafe { start(0) });
        started.map_err(|error| self.unavailable(error))
    }

    /// What an error before the start says about the driver.
    pub(crate) fn unavailable(&self, error: CudaError) -> Unavailable {
        let library = self.library.clone();
        match error {
            CudaError::Unavailable(reason) => reason,
            CudaError::MissingFunction { function } => {
                Unavailable::MissingFunction { library, function }
            }
            CudaError::Call(error) if error.code == NO_DEVICE => Unavailable::NoDevice { library },
            CudaError::Call(source) => Unavailable::Refused { library, source },
            error => Unavailable::NoLibrary { library, reason: error.to_string() },
        }
    }

    /// Its version.
    pub fn version(&self) -> DriverVersion {
        self.version
    }

    /// The library that was loaded.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Functions that a driver of this version should have and this one has not.
    pub fn missing_functions(&self) -> Vec<&'static str> {
        self.functions.missing(self.version.0)
    }

    /// Releases that the driver refused so far.
    pub fn failed_releases(&self) -> u64 {
        self.failed_releases.load(Ordering::Relaxed)
    }

    /// Counts a release that failed. Nothing else can be done about it.
    pub(crate) fn count_release(&self, released: &Result<(), CudaError>) {
        if released.is_err() {
            // Relaxed: a plain counter.
            self.failed_releases.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether all of these functions were found; the first that was not.
    pub(crate) fn need(&self, names: &[&'static str]) -> Result<(), CudaError> {
        // A function that is newer than the driver is missing, too.
        let missing = self.functions.missing(c_int::MAX);
        let first = names.iter().find(|name| missing.contains(name));
        first.map_or(Ok(()), |function| Err(CudaError::MissingFunction { function }))
    }

    /// Fails in a process that was forked from the one that started the driver.
    pub(crate) fn check_process(&self) -> Result<(), CudaError> {
        if self.process == process_mark() { Ok(()) } else { Err(Unavailable::Forked.into()) }
    }

    /// Calls a function; its status becomes an error.
    pub(crate) fn run<F: Copy>(
        &self,
        function: &Function<F>,
        call: impl FnOnce(F) -> Status,
    ) -> Result<(), CudaError> {
        self.check_process()?;
        let missing = CudaError::MissingFunction { function: function.name };
        match call(function.pointer.ok_or(missing)?) {
            SUCCESS => Ok(()),
            code => Err(self.call_error(function.name, code).into()),
        }
    }

    pub(crate) fn call_error(&self, call: &'static str, code: Status) -> CallError {
        CallError { call, code, name: self.error_name(code) }
    }

    fn error_name(&self, code: Status) -> String {
        let mut name = null();
        let found = self.functions.get_error_name.pointer.map(|find| {
            // SAFETY: writes the address of a string to a local variable.
            unsafe { find(code, &raw mut name) }
        });
        if found != Some(SUCCESS) || name.is_null() {
            return known_name(code).to_owned();
        }
        // SAFETY: a string of the driver that lives as long as its library, which is never closed.
        let name = unsafe { CStr::from_ptr(name) };
        name.to_string_lossy().into_owned()
    }
}

/// Finds all functions: by `cuGetProcAddress_v2` with the version whose form we know, so that a
/// newer driver gives no other form; in drivers without it (before CUDA 12.0) by the names that the
/// library exports.
fn find_functions(library: &Library) -> Functions {
    let Some(address) = library.find(c"cuGetProcAddress_v2") else {
        return Functions::find(|symbol| library.find(symbol.exported));
    };
    // SAFETY: a driver's function of this name has these arguments, see `functions.rs`.
    let get = unsafe { std::mem::transmute::<NonNull<c_void>, GetProcAddress>(address) };
    Functions::find(|symbol| found_by(get, symbol))
}

fn found_by(get: GetProcAddress, symbol: &Symbol) -> Option<NonNull<c_void>> {
    let (mut address, mut status) = (null_mut(), 0);
    let (name, since) = (symbol.base.as_ptr(), symbol.since);
    // SAFETY: the name ends with a zero, and the results are written to local variables.
    let code = unsafe { get(name, &raw mut address, since, 0, &raw mut status) };
    NonNull::new(address).filter(|_| code == SUCCESS && status == 0)
}
