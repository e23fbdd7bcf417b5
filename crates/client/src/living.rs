//! The sessions of this process that still hold a node's memory, counted: a process tells a node
//! that it is done with earlier runs only when all of its clients are.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tenant and run of the node.
type Run = (String, u64);

static RUNS: Mutex<BTreeMap<Run, usize>> = Mutex::new(BTreeMap::new());

fn runs() -> MutexGuard<'static, BTreeMap<Run, usize>> {
    RUNS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A session that lives. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Living(Run);

impl Living {
    pub(crate) fn begin(tenant: &str, epoch: u64) -> Self {
        let run = (tenant.to_owned(), epoch);
        *runs().entry(run.clone()).or_default() += 1;
        Self(run)
    }
}

impl Drop for Living {
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

/// Whether this process holds memory of no other run of a tenant's node.
pub(crate) fn is_only(tenant: &str, epoch: u64) -> bool {
    !runs().keys().any(|(of, run)| of == tenant && *run != epoch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_run_lives_until_its_last_session_ends() {
        let (one, other) = (Living::begin("of-this-test", 1), Living::begin("of-this-test", 1));
        let _now = Living::begin("of-this-test", 2);
        let _elsewhere = Living::begin("of-another", 1);
        assert!(!is_only("of-this-test", 2));
        drop(one);
        assert!(!is_only("of-this-test", 2), "another client of this process holds some still");
        drop(other);
        assert!(is_only("of-this-test", 2));
    }
}
