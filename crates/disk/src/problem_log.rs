//! A bounded list of problems found while a tier runs.

use std::collections::VecDeque;
use std::sync::PoisonError;

use cascade_runtime::LeafMutex;

/// Number of problems kept. The oldest is dropped first.
const KEPT_MAX: usize = 8;

/// The latest problems, each listed once.
#[derive(Debug, Default)]
pub(crate) struct ProblemLog(LeafMutex<VecDeque<String>>);

impl ProblemLog {
    pub(crate) fn new(initial: impl IntoIterator<Item = String>) -> Self {
        let problems = Self::default();
        initial.into_iter().for_each(|problem| problems.add(problem));
        problems
    }

    pub(crate) fn add(&self, problem: String) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.contains(&problem) {
            return;
        }
        if kept.len() == KEPT_MAX {
            kept.pop_front();
        }
        kept.push_back(problem);
    }

    pub(crate) fn all(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}
