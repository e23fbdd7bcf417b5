//! Time: clocks and deadlines.

mod clock;

pub use clock::{Clock, Deadline, ManualClock, SystemClock};
