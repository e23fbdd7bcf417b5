//! Formats an error and its causes in one line, for messages, logs and records.

use std::error::Error;

/// The error's message followed by the messages of its causes.
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // A transparent error repeats its cause.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use thiserror::Error;

    use super::*;

    #[derive(Debug, Error)]
    #[error("the disk failed")]
    struct DiskError;

    #[derive(Debug, Error)]
    #[error("cannot read a block")]
    struct ReadError(#[source] DiskError);

    #[derive(Debug, Error)]
    #[error(transparent)]
    struct TransparentError(ReadError);

    #[test]
    fn every_cause_is_printed_once() {
        assert_eq!(
            with_causes(&TransparentError(ReadError(DiskError))),
            "cannot read a block: the disk failed"
        );
    }
}
