//! One plot: its frame, axes and series, drawn as SVG with text that stays text.

use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;

use crate::cli::Failure;
use crate::report::palette::Hue;

/// A drawing area in the coordinates of two axes.
pub(super) type CanvasOf<'a, 'b, X, Y> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<<X as AsRangedCoord>::CoordDescType, <Y as AsRangedCoord>::CoordDescType>,
>;

/// The type of values along an axis.
type Along<X> = <X as AsRangedCoord>::Value;

/// The size of a drawing in its own units; the page scales it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    width: u32,
    height: u32,
}

/// A plot that shares a row with another.
pub(super) const HALF: Size = Size { width: 480, height: 270 };
/// A plot as wide as the page.
pub(super) const WIDE: Size = Size { width: 1000, height: 280 };

/// What stands along an axis.
pub(super) struct Axis<'a, X: AsRangedCoord> {
    /// From where to where.
    pub(super) range: X,
    /// What it is, with its unit.
    pub(super) title: &'a str,
    /// Labels at most.
    pub(super) labels: usize,
    /// How a value is written.
    pub(super) write: &'a dyn Fn(&Along<X>) -> String,
    /// Room for the labels beside the plot.
    pub(super) room: u32,
}

/// The failure of drawing one plot.
pub(super) fn failed(plot: &'static str) -> impl Fn(&dyn std::fmt::Display) -> Failure {
    move |error| Failure::Plot { plot, reason: error.to_string() }
}

/// Draws a plot, `draw` into the frame that the axes make, as one SVG element.
pub(super) fn svg<X, Y>(
    name: &'static str,
    size: Size,
    x: Axis<'_, X>,
    y: Axis<'_, Y>,
    draw: impl FnOnce(&mut CanvasOf<'_, '_, X, Y>) -> Result<(), Failure>,
) -> Result<String, Failure>
where
    X: AsRangedCoord,
    Y: AsRangedCoord,
    X::CoordDescType: Ranged<ValueType = Along<X>> + ValueFormatter<Along<X>>,
    Y::CoordDescType: Ranged<ValueType = Along<Y>> + ValueFormatter<Along<Y>>,
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
