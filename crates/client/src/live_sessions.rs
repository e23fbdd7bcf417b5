//! Counts the sessions of this process that may hold a node's memory. A process releases its holds
//! on an earlier run of a node only after its last session with that run has ended.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tenant and run of the node.
type Run = (String, u64);

/// Of the whole process: the ledger of a node names holders by process, not by session.
static RUNS: Mutex<BTreeMap<Run, usize>> = Mutex::new(BTreeMap::new());

fn runs() -> MutexGuard<'static, BTreeMap<Run, usize>> {
    RUNS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a session for as long as this value lives.
#[derive(Debug)]
pub(crate) struct LiveSession(Run);

impl LiveSession {
    pub(crate) fn register(tenant: &str, epoch: u64) -> Self {
        let run = (tenant.to_owned(), epoch);
        *runs().entry(run.clone()).or_default() += 1;
        Self(run)
    }
}

impl Drop for LiveSession {
    fn drop(&mut self) {
        let mut runs = runs();
        if let Some(count) = runs.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                runs.remove(&self.0);
            }
        }
    }
}

/// Whether this process has no sessions with other runs of a tenant's node.
pub(crate) fn is_only_run(tenant: &str, epoch: u64) -> bool {
    !runs().keys().any(|(of, run)| of == tenant && *run != epoch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_run_counts_until_its_last_session_ends() {
        let (one, other) =
            (LiveSession::register("of-this-test", 1), LiveSession::register("of-this-test", 1));
        let _now = LiveSession::register("of-this-test", 2);
        let _elsewhere = LiveSession::register("of-another", 1);
        assert!(!is_only_run("of-this-test", 2));
        drop(one);
        assert!(
            !is_only_run("of-this-test", 2),
            "another client of this process still has a session"
        );
        drop(other);
        assert!(is_only_run("of-this-test", 2));
    }
}
