//! One plot: its frame, axes and series, drawn as SVG with selectable text.

use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;

use crate::report::PlotError;
use crate::report::palette::Hue;

/// A drawing area in the coordinates of two axes.
pub type CanvasOf<'a, 'b, X, Y> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<<X as AsRangedCoord>::CoordDescType, <Y as AsRangedCoord>::CoordDescType>,
>;

/// The type of the values on an axis.
type AxisValue<X> = <X as AsRangedCoord>::Value;

/// The size of a plot in SVG units. The page scales it.
#[derive(Debug, Clone, Copy)]
pub struct PlotSize {
    width: u32,
    height: u32,
}

/// A plot of half the page's width.
pub const HALF: PlotSize = PlotSize { width: 480, height: 270 };
/// A plot as wide as the page.
pub const WIDE: PlotSize = PlotSize { width: 1000, height: 280 };

/// The range and labels of an axis.
pub struct Axis<'a, X: AsRangedCoord> {
    /// Range of values.
    pub range: X,
    /// Title with the unit.
    pub title: &'a str,
    /// Limit of the number of labels.
    pub labels: usize,
    /// Formats a value as a label.
    pub write: &'a dyn Fn(&AxisValue<X>) -> String,
    /// Space for the labels beside the plot.
    pub room: u32,
}

impl<X: AsRangedCoord> std::fmt::Debug for Axis<'_, X> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Axis").field("title", &self.title).finish_non_exhaustive()
    }
}

/// A failure while drawing a plot.
pub fn failed(plot: &'static str) -> impl Fn(&dyn std::fmt::Display) -> PlotError {
    move |error| PlotError { plot, reason: error.to_string() }
}

/// Draws a frame with axes, lets `draw` add the series, and returns one SVG element.
pub fn svg<X, Y>(
    name: &'static str,
    size: PlotSize,
    x: Axis<'_, X>,
    y: Axis<'_, Y>,
    draw: impl FnOnce(&mut CanvasOf<'_, '_, X, Y>) -> Result<(), PlotError>,
) -> Result<String, PlotError>
where
    X: AsRangedCoord,
    Y: AsRangedCoord,
    X::CoordDescType: Ranged<ValueType = AxisValue<X>> + ValueFormatter<AxisValue<X>>,
    Y::CoordDescType: Ranged<ValueType = AxisValue<Y>> + ValueFormatter<AxisValue<Y>>,
{
    let fail = failed(name);
    let mut text = String::new();
    {
        let root =
            SVGBackend::with_string(&mut text, (size.width, size.height)).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(6)
            .margin_right(18)
            .x_label_area_size(x.room)
            .y_label_area_size(y.room)
            .build_cartesian_2d(x.range, y.range)
            .map_err(|error| fail(&error))?;
        let label = ("sans-serif", 13).into_font().color(&Hue::Soft.marker());
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(Hue::Line.marker())
            .axis_style(Hue::Line.marker())
            .label_style(label.clone())
            .axis_desc_style(label)
            .x_desc(x.title)
            .y_desc(y.title)
            .x_labels(x.labels)
            .y_labels(y.labels)
            .x_label_formatter(&x.write)
            .y_label_formatter(&y.write)
            .draw()
            .map_err(|error| fail(&error))?;
        draw(&mut chart)?;
        drop(chart);
        root.present().map_err(|error| fail(&error))?;
    }
    Ok(text)
}
