//! The HTML report of `cascade replay --report`: one self-contained file with plots.

mod captions;
mod charts;
mod page;
pub mod palette;
pub mod plot;

pub use page::{environment_table, page};

/// The style sheet of a page, with light and dark colours for each [`palette::Hue`].
pub const STYLE: &str = include_str!("report/style.css");

/// A plot of the report could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw the plot {plot:?}: {reason}")]
pub struct PlotError {
    /// The title of the plot.
    pub plot: &'static str,
    /// The cause.
    pub reason: String,
}
