//! The HTML report of `cascade replay --report`: one self-contained file with plots.

mod captions;
mod charts;
mod page;
mod palette;
mod plot;

pub use page::page;

/// A plot of the report could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw the plot {plot:?}: {reason}")]
pub struct PlotError {
    /// The title of the plot.
    pub plot: &'static str,
    /// The cause.
    pub reason: String,
}
