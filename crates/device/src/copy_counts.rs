//! What a context copied and registered, for its operator. Counted by atomics, once a submission.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::plan::Direction;

/// Copies in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyCount {
    /// Copies. Fragments that are neighbours on both sides are one.
    pub copies: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What all copiers of a context copied, and what its pools registered, since it was retained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyReport {
    /// To the device.
    pub to_device: CopyCount,
    /// To the host.
    pub to_host: CopyCount,
    /// Within the memory of devices.
    pub within: CopyCount,
    /// Those of these bytes that went through a small buffer, because the driver had not registered
    /// their part of the pool.
    pub unregistered_bytes: u64,
    /// Submissions whose copies were all started. Only their copies are counted above.
    pub submissions: u64,
    /// Submissions that the driver refused or that found the context lost. Some of their copies may
    /// have been made.
    pub failed_submissions: u64,
    /// Submissions that were seen to be over.
    pub ended_submissions: u64,
    /// The sum over these of the host's time, from the return of the submission until the host saw
    /// that it was over. It includes waits of the device for work before the copies.
    pub host_time: Duration,
    /// Bytes of pools that the driver registered, also of pools that are gone.
    pub registered_bytes: u64,
    /// Bytes of pools that were not registered because the driver refused.
    pub refused_bytes: u64,
    /// The time that the driver took for both.
    pub registration_time: Duration,
}

/// The copies of a submission by direction, before it is counted.
#[derive(Debug, Default)]
pub(crate) struct Submission {
    pub(crate) to_device: CopyCount,
    pub(crate) to_host: CopyCount,
    pub(crate) within: CopyCount,
    pub(crate) unregistered_bytes: usize,
}

/// The counts behind a [`CopyReport`].
#[derive(Debug, Default)]
pub(crate) struct CopyCounts {
    to_device: Total,
    to_host: Total,
    within: Total,
    unregistered_bytes: AtomicU64,
    submissions: AtomicU64,
    failed_submissions: AtomicU64,
    ended_submissions: AtomicU64,
    host_ns: AtomicU64,
    registered_bytes: AtomicU64,
    refused_bytes: AtomicU64,
    registration_ns: AtomicU64,
}

#[derive(Debug, Default)]
struct Total {
    copies: AtomicU64,
    bytes: AtomicU64,
}

impl Submission {
    /// The copies in a direction.
    pub(crate) fn in_direction(&mut self, direction: Direction) -> &mut CopyCount {
        match direction {
            Direction::ToDevice => &mut self.to_device,
            Direction::ToHost => &mut self.to_host,
        }
    }
}

impl CopyCount {
    pub(crate) fn add(&mut self, bytes: usize) {
        self.copies += 1;
        self.bytes += bytes as u64;
    }
}

impl Total {
    fn add(&self, count: CopyCount) {
        add(&self.copies, count.copies);
        add(&self.bytes, count.bytes);
    }

    fn get(&self) -> CopyCount {
        CopyCount { copies: get(&self.copies), bytes: get(&self.bytes) }
    }
}

impl CopyCounts {
    /// Counts a submission whose copies were started.
    pub(crate) fn begin(&self, submission: &Submission) {
        self.to_device.add(submission.to_device);
        self.to_host.add(submission.to_host);
        self.within.add(submission.within);
        add(&self.unregistered_bytes, submission.unregistered_bytes as u64);
        add(&self.submissions, 1);
    }

    /// Counts a submission that failed.
    pub(crate) fn fail(&self) {
        add(&self.failed_submissions, 1);
    }

    /// Counts the end of a submission.
    pub(crate) fn end(&self, host_time: Duration) {
        add(&self.ended_submissions, 1);
        add_time(&self.host_ns, host_time);
    }

    /// Counts a call that registered memory.
    pub(crate) fn register(&self, bytes: usize, took: Duration) {
        add(&self.registered_bytes, bytes as u64);
        add_time(&self.registration_ns, took);
    }

    /// Counts a refused call, and the memory that is not registered because of it.
    pub(crate) fn refuse(&self, bytes: usize, took: Duration) {
        add(&self.refused_bytes, bytes as u64);
        add_time(&self.registration_ns, took);
    }

    pub(crate) fn report(&self) -> CopyReport {
        CopyReport {
            to_device: self.to_device.get(),
            to_host: self.to_host.get(),
            within: self.within.get(),
            unregistered_bytes: get(&self.unregistered_bytes),
            submissions: get(&self.submissions),
            failed_submissions: get(&self.failed_submissions),
            ended_submissions: get(&self.ended_submissions),
            host_time: Duration::from_nanos(get(&self.host_ns)),
            registered_bytes: get(&self.registered_bytes),
            refused_bytes: get(&self.refused_bytes),
            registration_time: Duration::from_nanos(get(&self.registration_ns)),
        }
    }
}

// Relaxed: nothing else depends on these numbers. A report may see one of two that belong together.

fn add(count: &AtomicU64, amount: u64) {
    if amount > 0 {
        count.fetch_add(amount, Ordering::Relaxed);
    }
}

fn add_time(count: &AtomicU64, time: Duration) {
    add(count, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
}

fn get(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}
