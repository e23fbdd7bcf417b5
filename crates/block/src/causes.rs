//! An error and all its causes in one line, for where only text can go: a message, a log, a record.

use std::error::Error;

/// The error's message followed by those of its causes.
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
    #[error("the disk is gone")]
    struct Gone;

    #[derive(Debug, Error)]
    #[error("cannot read a block")]
    struct Unread(#[source] Gone);

    #[derive(Debug, Error)]
    #[error(transparent)]
    struct Passed(Unread);

    #[test]
    fn every_cause_is_told_once() {
        assert_eq!(with_causes(&Passed(Unread(Gone))), "cannot read a block: the disk is gone");
    }
}
