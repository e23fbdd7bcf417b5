//! The HTML report of `cascade replay --report`: one self-contained file with plots.

mod captions;
mod charts;
mod page;
mod palette;
mod plot;

pub use page::page;
