//! Saves on their way from the memory of a GPU: one submission, with the blocks of several puts.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::with_causes;
use cascade_device::{CudaError, Slabs};
use cascade_memory::{HostSlabMut, SlabMut};
use cascade_runtime::Deadline;
use pyo3::prelude::*;

use super::{Flight, PyGpuEvent, PyGpuMemory, deadline, exception, to_python};
use crate::arguments::of;

/// Copies of one submission from the memory of a GPU, for the blocks of one or several puts.
#[pyclass(name = "GpuSave", module = "cascadekv", frozen)]
pub(crate) struct PyGpuSave(Option<Arc<Submission>>);

/// The part of a submission that one put has.
pub(crate) struct PutSave {
    submission: Arc<Submission>,
    /// Index of the put.
    place: usize,
}

/// The blocks of one put to save: slabs, and the page for each.
pub(crate) type SavedBlocks = Vec<(SlabMut, usize)>;

struct Submission {
    flight: Flight,
    /// By put.
    puts: Mutex<Vec<PutSlabs>>,
}

/// The slabs of one put.
enum PutSlabs {
    /// The copies have them: this number.
    InFlight(usize),
    /// The put was released before its copies were over. They have this number.
    Released(usize),
    /// The copies are over.
    Landed(Vec<SlabMut>),
    /// The put took them, or they went back to the pool.
    Gone,
}

impl PyGpuMemory {
    /// Starts to copy pages to the slabs of several puts, in one submission; returns the part of
    /// each put. All slabs are freed if it fails.
    pub(crate) fn start_save(
        &self,
        puts: Vec<SavedBlocks>,
        after: &PyGpuEvent,
    ) -> PyResult<(PyGpuSave, Vec<Option<PutSave>>)> {
        if puts.iter().all(Vec::is_empty) {
            return Ok((PyGpuSave(None), puts.iter().map(|_| None).collect()));
        }
        let counts: Vec<usize> = puts.iter().map(Vec::len).collect();
        let start = || {
            let (slabs, pages): (Vec<_>, Vec<_>) = puts.into_iter().flatten().unzip();
            let (copies, slabs) = self.device.slabs_to_save(slabs, self.ways)?;
            let transfer = self.transfer(slabs, &pages, 0..self.places.len());
            let pending = copies.saves.submit_transfer(transfer, Some(&after.0))?;
            Ok(Flight::new(pending, copies, &self.device.context))
        };
        let flight = start().map_err(|error: CudaError| to_python(&error))?;
        let slabs = counts.iter().map(|count| PutSlabs::InFlight(*count)).collect();
        let submission = Submission { flight, puts: Mutex::new(slabs) };
        let submission = Arc::new(submission);
        let part = |(place, count): (usize, usize)| {
            let submission = Arc::clone(&submission);
            (count > 0).then_some(PutSave { submission, place })
        };
        let parts = counts.into_iter().enumerate().map(part).collect();
        Ok((PyGpuSave(Some(submission)), parts))
    }
}

#[pymethods]
impl PyGpuSave {
    /// Makes all later work of a stream wait for the copies, so that it may write the pages again.
    /// After an exception nothing is in flight any more.
    #[pyo3(signature = (stream, /))]
    fn hold_back(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::stream)] stream: usize,
    ) -> PyResult<()> {
        let Some(submission) = &self.0 else { return Ok(()) };
        py.detach(|| submission.hold_back(stream))
    }

    /// Whether the copies are over.
    fn is_over(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(submission) = &self.0 else { return Ok(true) };
        let is_over = py.detach(|| submission.flight.end.is_over());
        is_over.map_err(|error| to_python(&error))
    }
}

impl Submission {
    fn hold_back(&self, stream: usize) -> PyResult<()> {
        self.flight.hold_back(stream).map_err(|error| to_python(&error))
    }

    fn puts(&self) -> MutexGuard<'_, Vec<PutSlabs>> {
        self.puts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives each put its slabs, once the copies are over.
    fn land(&self, puts: &mut [PutSlabs], deadline: Deadline) -> Result<(), CudaError> {
        let transfer = self.flight.wait(deadline)?;
        let slabs: Vec<SlabMut> = match transfer.map(|transfer| transfer.slabs) {
            Some(Slabs::ToHost(slabs)) => slabs.into_iter().map(HostSlabMut::into_slab).collect(),
            Some(Slabs::ToDevicePool(slabs)) => slabs,
            Some(Slabs::ToDevice(_) | Slabs::FromDevicePool(_)) | None => return Ok(()),
        };
        let mut slabs = slabs.into_iter();
        for put in puts {
            match *put {
                PutSlabs::InFlight(count) => {
                    *put = PutSlabs::Landed(slabs.by_ref().take(count).collect());
                }
                PutSlabs::Released(count) => {
                    slabs.by_ref().take(count).for_each(drop);
                    *put = PutSlabs::Gone;
                }
                PutSlabs::Landed(_) | PutSlabs::Gone => {}
            }
        }
        Ok(())
    }

    /// The exception for an error of the copies. It fails all puts of the submission.
    fn failure(&self, error: &CudaError) -> PyErr {
        let puts = self.puts().len();
        if puts < 2 {
            return to_python(error);
        }
        let causes = with_causes(error);
        exception(error, format!("copies of one submission for {puts} puts: {causes}"))
    }
}

impl PutSave {
    /// Makes all later work of a stream wait for the copies.
    pub(crate) fn hold_back(&self, stream: usize) -> PyResult<()> {
        self.submission.hold_back(stream)
    }

    /// Waits for the copies and gives back the slabs of this put, in the order in which they were
    /// given. None are left for a second call.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> PyResult<Vec<SlabMut>> {
        let deadline = deadline(timeout);
        // Not under the lock: other puts wait by their own deadlines.
        let waited = self.submission.flight.end.wait(deadline);
        waited.map_err(|error| self.submission.failure(&error))?;
        let mut puts = self.submission.puts();
        self.submission.land(&mut puts, deadline).map_err(|error| to_python(&error))?;
        Ok(match mem::replace(&mut puts[self.place], PutSlabs::Gone) {
            PutSlabs::Landed(slabs) => slabs,
            PutSlabs::InFlight(_) | PutSlabs::Released(_) | PutSlabs::Gone => Vec::new(),
        })
    }
}

impl Drop for PutSave {
    fn drop(&mut self) {
        let slabs = &mut self.submission.puts()[self.place];
        *slabs = match *slabs {
            PutSlabs::InFlight(count) | PutSlabs::Released(count) => PutSlabs::Released(count),
            PutSlabs::Landed(_) | PutSlabs::Gone => PutSlabs::Gone,
        };
    }
}
