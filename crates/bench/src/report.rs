//! The page of plots that `cascade replay --report` writes: one file, nothing fetched.

mod captions;
mod charts;
mod page;
mod palette;
mod plot;

pub use page::page;
