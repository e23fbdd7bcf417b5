//! The context of a device: what every call about its memory needs, until an error ends it.
#![expect(unsafe_code, reason = "calls the driver")]

use std::cell::Cell;
use std::fmt;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cascade_runtime::{Clock, Deadline, sleep, yield_now};

use crate::copy_counts::{CopyCounts, CopyReport};
use crate::device_uuid::DeviceUuid;
use crate::driver::Driver;
use crate::error::{CudaError, NOT_READY, SUCCESS};
use crate::functions::{DeviceNumber, Function, Functions, Handle, Status, Uuid};

/// Without one of these nothing can be ordered, or nothing released.
const NEEDED: [&str; 13] = [
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuStreamQuery",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
];

/// How often a wait asks the device before it sleeps in between.
const EAGER_POLLS: u32 = 100;
/// The first and the longest sleep between two questions.
const SLEEP_MIN: Duration = Duration::from_micros(20);
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// The primary context of a device, which all libraries of the process share.
pub struct Context {
    driver: Arc<Driver>,
    device: DeviceNumber,
    handle: Handle,
    clock: Arc<dyn Clock>,
    /// The longest wait for work of our own.
    wait_max: Duration,
    /// The error that ended the context.
    poison: OnceLock<Arc<CudaError>>,
    copy_counts: CopyCounts,
}

// SAFETY: the handle is an address that only the driver follows, from any thread.
unsafe impl Send for Context {}
// SAFETY: the driver may be called by several threads at once; each has its own current context.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of a device, by its index. Work of our own on it that is not over after
    /// `wait_max` counts as lost.
    ///
    /// # Errors
    /// If there is no such device, the driver lacks a function, or it refuses.
    pub fn retain(
        driver: &Arc<Driver>,
        index: usize,
        clock: Arc<dyn Clock>,
        wait_max: Duration,
    ) -> Result<Arc<Self>, CudaError> {
        driver.need(&NEEDED)?;
        let device = device_number(driver, index)?;
        let mut handle = null_mut();
        // SAFETY: writes to a local variable; the device exists.
        let retain = |retain: unsafe extern "C" fn(*mut Handle, DeviceNumber) -> Status| unsafe {
            retain(&raw mut handle, device)
        };
        driver.run(&driver.functions.primary_ctx_retain, retain)?;
        let (driver, poison) = (Arc::clone(driver), OnceLock::new());
        let copy_counts = CopyCounts::default();
        Ok(Arc::new(Self { driver, device, handle, clock, wait_max, poison, copy_counts }))
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// What all copiers copied by it.
    pub fn copy_report(&self) -> CopyReport {
        self.copy_counts.report()
    }

    /// The counts of its copiers.
    pub(crate) fn copy_counts(&self) -> &CopyCounts {
        &self.copy_counts
    }

    /// The driver's number of its device.
    pub(crate) fn device(&self) -> DeviceNumber {
        self.device
    }

    /// The UUID of its device.
    ///
    /// # Errors
    /// If the driver does not say it.
    pub fn device_uuid(&self) -> Result<DeviceUuid, CudaError> {
        self.check()?;
        uuid_of(&self.driver, self.device)
    }

    /// Memory of the device that nobody has taken.
    ///
    /// # Errors
    /// If the driver does not say it, or the context is lost.
    pub fn free_bytes(&self) -> Result<u64, CudaError> {
        let (mut free, mut total) = (0, 0);
        let get = |get: unsafe extern "C" fn(*mut usize, *mut usize) -> Status| {
            // SAFETY: writes to local variables.
            unsafe { get(&raw mut free, &raw mut total) }
        };
        self.with(|| self.call(|functions| &functions.mem_get_info, get))?;
        Ok(free as u64)
    }

    /// The clock of its waits.
    pub(crate) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// The end of work of our own that starts now.
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.clock(), self.wait_max)
    }

    /// The error that ended the context, if one did.
    pub fn poison(&self) -> Option<&Arc<CudaError>> {
        self.poison.get()
    }

    /// Ends the context: no later call reaches the driver.
    pub(crate) fn lose(&self, cause: CudaError) {
        if !matches!(cause, CudaError::Poisoned { .. }) {
            self.poison.get_or_init(|| Arc::new(cause));
        }
    }

    /// Fails if the context is lost, or if this process was forked.
    pub(crate) fn check(&self) -> Result<(), CudaError> {
        self.driver.check_process()?;
        match self.poison.get() {
            Some(cause) => Err(CudaError::Poisoned { cause: Arc::clone(cause) }),
            None => Ok(()),
        }
    }

    /// Calls a function of the driver. A fatal error ends the context.
    pub(crate) fn call<F: Copy>(
        &self,
        function: impl FnOnce(&Functions) -> &Function<F>,
        call: impl FnOnce(F) -> Status,
    ) -> Result<(), CudaError> {
        self.check()?;
        let called = self.driver.run(function(&self.driver.functions), call);
        called.inspect_err(|error| {
            if error.is_fatal() {
                self.lose(error.clone());
            }
        })
    }

    /// Asks the driver whether something is over.
    pub(crate) fn query<F: Copy>(
        &self,
        function: impl FnOnce(&Functions) -> &Function<F>,
        call: impl FnOnce(F) -> Status,
    ) -> Result<bool, CudaError> {
        let mut status = SUCCESS;
        let ask = |asked| {
            status = call(asked);
            if status == NOT_READY { SUCCESS } else { status }
        };
        self.call(function, ask)?;
        Ok(status == SUCCESS)
    }

    /// Runs calls with this context as the thread's current one, which most functions need. Other
    /// libraries of the thread find their own context current again.
    pub(crate) fn with<T>(
        &self,
        run: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let push = |push: unsafe extern "C" fn(Handle) -> Status| {
            // SAFETY: the context is retained until this value is dropped.
            unsafe { push(self.handle) }
        };
        self.call(|functions| &functions.ctx_push_current, push)?;
        let result = run();
        let mut popped = null_mut();
        let pop = |pop: unsafe extern "C" fn(*mut Handle) -> Status| {
            // SAFETY: writes to a local variable.
            unsafe { pop(&raw mut popped) }
        };
        // Not by `call`: what was pushed is popped, also if `run` lost the context.
        let popped = self.driver.run(&self.driver.functions.ctx_pop_current, pop);
        let result = result?;
        popped?;
        Ok(result)
    }

    /// Releases something by a call that needs the current context. Does nothing in a lost context,
    /// whose calls may hang, and in a forked process, which has nothing to release.
    pub(crate) fn release<F: Copy>(
        &self,
        function: impl Fn(&Functions) -> &Function<F>,
        call: impl Fn(F) -> Status,
    ) {
        if self.check().is_err() {
            return;
        }
        let is_called = Cell::new(false);
        let release = || {
            self.with(|| {
                is_called.set(true);
                self.call(&function, &call)
            })
        };
        // A call that failed may have released it: it is never made twice.
        let released =
            release().or_else(|error| if is_called.get() { Err(error) } else { release() });
        self.driver.count_release(&released);
    }

    /// Waits until something is over, at most until a deadline. Never by a call of the driver that
    /// waits: such a call has no time limit.
    pub(crate) fn wait(
        &self,
        work: &'static str,
        deadline: Deadline,
        is_over: impl Fn() -> Result<bool, CudaError>,
    ) -> Result<(), CudaError> {
        let started = self.clock.monotonic();
        let (mut polls, mut pause) = (0, SLEEP_MIN);
        while !is_over()? {
            if deadline.has_passed(self.clock()) {
                let waited = self.clock.monotonic().saturating_sub(started);
                return Err(CudaError::TimedOut { work, waited });
            }
            polls += 1;
            if polls < EAGER_POLLS {
                yield_now();
            } else {
                sleep(pause);
                pause = (pause * 2).min(SLEEP_MAX);
            }
        }
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.check().is_err() {
            return;
        }
        let release = |release: unsafe extern "C" fn(DeviceNumber) -> Status| {
            // SAFETY: retained once, by `retain`.
            unsafe { release(self.device) }
        };
        let released = self.driver.run(&self.driver.functions.primary_ctx_release, release);
        self.driver.count_release(&released);
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lost = self.poison.get().is_some();
        f.debug_struct("Context")
            .field("device", &self.device)
            .field("lost", &lost)
            .finish_non_exhaustive()
    }
}

/// The driver's number of a device, by its index.
pub(crate) fn device_number(driver: &Driver, index: usize) -> Result<DeviceNumber, CudaError> {
    let (mut device, index) = (0, i32::try_from(index).unwrap_or(i32::MAX));
    // SAFETY: writes to a local variable.
    driver.run(&driver.functions.device_get, |get| unsafe { get(&raw mut device, index) })?;
    Ok(device)
}

/// The UUID of a device.
pub(crate) fn uuid_of(driver: &Driver, device: DeviceNumber) -> Result<DeviceUuid, CudaError> {
    let mut uuid: Uuid = [0; 16];
    let get = |get: unsafe extern "C" fn(*mut Uuid, DeviceNumber) -> Status| {
        // SAFETY: writes 16 bytes to a local array.
        unsafe { get(&raw mut uuid, device) }
    };
    driver.run(&driver.functions.device_get_uuid, get)?;
    Ok(DeviceUuid::from_bytes(uuid))
}
