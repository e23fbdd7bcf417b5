//! A row of JSON, as it is in a file.

use serde::de::IgnoredAny;
use serde_json::Value;

use super::TraceError;

/// A row of JSON.
#[derive(Debug)]
pub(super) struct Record {
    /// The line at which it begins.
    pub(super) line: usize,
    pub(super) text: Vec<u8>,
    /// Whether the file ends with it, without a line break or the end of the array.
    pub(super) ends_file: bool,
}

impl Record {
    /// Whether the file ends within it.
    pub(super) fn is_incomplete(&self) -> bool {
        let parsed = serde_json::from_slice::<IgnoredAny>(&self.text);
        self.ends_file && parsed.is_err_and(|error| error.is_eof())
    }

    pub(super) fn parse(&self, file: &str) -> Result<Value, TraceError> {
        // Without the line break, behind which the parser would see one line more.
        let text = self.text.trim_ascii_end();
        serde_json::from_slice(text).map_err(|error| TraceError::Syntax {
            file: file.to_owned(),
            line: self.line + error.line().saturating_sub(1),
            reason: error.to_string(),
        })
    }
}
