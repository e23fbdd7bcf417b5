//! Copies to submit in either form that a copier takes, and their time.

use std::time::Duration;

use cascade_device::{Copier, Copy, CopyPlan, CudaError, Pending, Slabs, Transfer};
use cascade_runtime::{Clock as _, Deadline, SystemClock, yield_now};

use super::{failed, soon};
use crate::MeasureError;

/// The function of a copier that fragments are submitted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// `Copier::submit`.
    Copies,
    /// `Copier::submit_transfer`, which plans them first.
    Transfer,
}

/// Copies that can be submitted.
pub(super) enum Work {
    Copies(Vec<Copy>),
    Transfer(Transfer),
}

/// Copies that were submitted.
pub(super) enum Started {
    Copies(Pending<Vec<Copy>>),
    Transfer(Pending<Transfer>),
}

impl Work {
    pub(super) fn submit(self, copier: &Copier) -> Result<Started, CudaError> {
        Ok(match self {
            Self::Copies(copies) => Started::Copies(copier.submit(copies, None)?),
            Self::Transfer(transfer) => Started::Transfer(copier.submit_transfer(transfer, None)?),
        })
    }

    /// The plan of a transfer, and its slabs. Copies have none.
    pub(super) fn planned(self, copier: &Copier) -> Result<(CopyPlan, Slabs), CudaError> {
        match self {
            Self::Copies(copies) => Ok((CopyPlan::default(), slabs_of(copies))),
            Self::Transfer(mut transfer) => {
                copier.planned(&mut transfer).map(|plan| (plan, transfer.slabs))
            }
        }
    }
}

impl Started {
    fn is_over(&self) -> Result<bool, CudaError> {
        match self {
            Self::Copies(pending) => pending.is_over(),
            Self::Transfer(pending) => pending.is_over(),
        }
    }

    /// Waits, and gives back the slabs in their order.
    pub(super) fn wait(self, deadline: Deadline) -> Result<Slabs, MeasureError> {
        match self {
            Self::Copies(mut pending) => {
                Ok(slabs_of(pending.wait(deadline).map_err(failed)?.unwrap_or_default()))
            }
            Self::Transfer(mut pending) => {
                let transfer = pending.wait(deadline).map_err(failed)?;
                Ok(transfer.map_or(Slabs::ToDevice(Vec::new()), |transfer| transfer.slabs))
            }
        }
    }
}

/// The slabs of copies in one direction.
fn slabs_of(copies: Vec<Copy>) -> Slabs {
    let (mut sources, mut targets) = (Vec::new(), Vec::new());
    for copy in copies {
        match copy {
            Copy::ToDevice { source, .. } => sources.push(source),
            Copy::ToHost { target, .. } => targets.push(target),
            Copy::Within { .. } => {}
        }
    }
    if targets.is_empty() { Slabs::ToDevice(sources) } else { Slabs::ToHost(targets) }
}

/// The time from the first submission until the last copy is over, and the slabs of each.
pub(super) fn timed_work(
    works: Vec<(&Copier, Work)>,
) -> Result<(Duration, Vec<Slabs>), MeasureError> {
    let mut started = Vec::with_capacity(works.len());
    let began = SystemClock.monotonic();
    for (copier, work) in works {
        started.push(work.submit(copier).map_err(failed)?);
    }
    let deadline = soon();
    for copies in &started {
        // `Pending::wait` sleeps between two questions, which would be a part of the time.
        while !copies.is_over().map_err(failed)? && !deadline.has_passed(&SystemClock) {
            yield_now();
        }
    }
    let took = SystemClock.monotonic().saturating_sub(began);
    let slabs = started.into_iter().map(|copies| copies.wait(deadline));
    Ok((took, slabs.collect::<Result<_, MeasureError>>()?))
}
