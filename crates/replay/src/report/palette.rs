//! Colours by meaning. A plot contains markers, and the style sheet maps each to a colour.

use plotters::style::RGBColor;

/// The meaning of a colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hue {
    /// Text.
    Ink,
    /// Axes and notes.
    Soft,
    /// Grid lines.
    Line,
    /// The DRAM tier.
    Dram,
    /// The file tier.
    Files,
    /// Any other tier or call.
    Other,
    /// The upper bound.
    Best,
    /// Misses.
    Miss,
}

impl Hue {
    /// The marker colour that `style.css` replaces.
    pub fn marker(self) -> RGBColor {
        let level = match self {
            Self::Ink => 1,
            Self::Soft => 2,
            Self::Line => 3,
            Self::Dram => 4,
            Self::Files => 5,
            Self::Other => 6,
            Self::Best => 7,
            Self::Miss => 8,
        };
        RGBColor(level, level, level)
    }

    /// The class of its swatch in a legend.
    pub fn class(self) -> &'static str {
        match self {
            Self::Ink | Self::Soft | Self::Line => "c-soft",
            Self::Dram => "c-dram",
            Self::Files => "c-files",
            Self::Other => "c-other",
            Self::Best => "c-best",
            Self::Miss => "c-miss",
        }
    }

    /// A tier's colour.
    pub fn of_tier(tier: &str) -> Self {
        match tier {
            "dram" => Self::Dram,
            "files" => Self::Files,
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_style_sheet_replaces_every_marker() {
        use Hue::{Best, Dram, Files, Ink, Line, Miss, Other, Soft};
        let css = include_str!("style.css");
        for hue in [Ink, Soft, Line, Dram, Files, Other, Best, Miss] {
            let RGBColor(r, g, b) = hue.marker();
            let marker = format!("#{r:02X}{g:02X}{b:02X}");
            assert!(css.contains(&format!("[fill=\"{marker}\"]")), "{hue:?}");
            assert!(css.contains(&format!("[stroke=\"{marker}\"]")), "{hue:?}");
            assert!(css.contains(&format!(".{}", hue.class())), "{hue:?}");
        }
    }
}
