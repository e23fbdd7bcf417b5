//! What the checks of a world found.

use std::fmt;

use cascade_runtime::simulated::World;
use serde::{Deserialize, Serialize};

/// Violations of one world that are listed; further ones are counted.
const LISTED_MAX: usize = 20;

/// The violations of a world.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Whose results are checked now, for the text.
    context: Option<Context>,
    pub(crate) wrong_bytes: u64,
    pub(crate) count: u64,
    pub(crate) listed: Vec<Finding>,
}

/// The call whose results are checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context {
    pub(crate) client: usize,
    /// The number of the operation in its world.
    pub(crate) operation: u64,
    pub(crate) name: &'static str,
}

/// One violation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Finding {
    pub(crate) text: String,
    /// Virtual time, in microseconds.
    pub(crate) time_us: u64,
    /// Scheduling points before it.
    pub(crate) points: u64,
}

impl Findings {
    /// Names the call whose results are checked next; `None` for the whole world.
    pub(crate) fn set_context(&mut self, context: Option<Context>) {
        self.context = context;
    }

    pub(crate) fn add(&mut self, what: impl fmt::Display) {
        self.count += 1;
        if self.listed.len() == LISTED_MAX {
            return;
        }
        let text = match self.context {
            None => what.to_string(),
            Some(Context { client, operation, name }) => {
                format!("operation {operation}, `{name}` of client {client}: {what}")
            }
        };
        let points = World::current().map_or(0, World::points);
        let time_us = u64::try_from(cascade_runtime::now().as_micros()).unwrap_or(u64::MAX);
        self.listed.push(Finding { text, time_us, points });
    }

    pub(crate) fn add_wrong_bytes(&mut self, what: impl fmt::Display) {
        self.wrong_bytes += 1;
        self.add(format_args!("wrong bytes: {what}"));
    }

    /// Whether so much went wrong that the rest of the world tells nothing new.
    pub(crate) fn is_enough(&self) -> bool {
        self.listed.len() == LISTED_MAX
    }
}
