//! Pipelines: an ordered list of stages, written `"Dram|Files"`.

use crate::PipelineError;
use crate::catalog::LOWER_STAGES_MAX;
use crate::stage::Registry;

/// Tiers that this build knows by name but that need hardware or peers it does not have.
const ABSENT: [&str; 2] = ["hbm", "peers"];

/// Stages for studies of hit rates and ceilings: they are taken, and nobody is offered one.
const FOR_STUDIES: [&str; 2] = ["empty", "fake"];

/// What an operator may write into a pipeline.
fn offered(registry: &Registry) -> Vec<String> {
    let names = registry.names().into_iter();
    names.filter(|name| !FOR_STUDIES.contains(&name.as_str())).collect()
}

/// A pipeline that was checked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pipeline {
    /// Whether blocks are kept in DRAM.
    pub has_dram: bool,
    /// Names of the stages below, lower case, fast to slow.
    pub lower: Vec<String>,
    /// What was left out, and why.
    pub notes: Vec<String>,
}

impl Pipeline {
    /// Parses and checks. Names are not case-sensitive; `Cache` is `Dram`.
    pub fn parse(text: &str, registry: &Registry) -> Result<Self, PipelineError> {
        let bad = |reason: String| PipelineError::BadOrder { pipeline: text.to_owned(), reason };
        let mut pipeline = Self::default();
        for (position, raw) in text.split('|').enumerate() {
            let stage = raw.trim().to_lowercase();
            match stage.as_str() {
                "" => {
                    return Err(bad(format!("the stage at position {} has no name", position + 1)));
                }
                "dram" | "cache" if pipeline.has_dram => {
                    return Err(bad(format!("{} stands in it twice", raw.trim())));
                }
                "dram" | "cache" if !pipeline.lower.is_empty() => {
                    let slower = &pipeline.lower[0];
                    return Err(bad(format!("{} has to come before {slower}", raw.trim())));
                }
                "dram" | "cache" => pipeline.has_dram = true,
                "empty" => pipeline.notes.push("Empty keeps nothing".to_owned()),
                absent if ABSENT.contains(&absent) => {
                    pipeline.notes.push(format!("{} is not available here: left out", raw.trim()));
                }
                lower if pipeline.lower.iter().any(|other| other == lower) => {
                    return Err(bad(format!("{} stands in it twice", raw.trim())));
                }
                lower if registry.knows(lower) => pipeline.lower.push(stage),
                _ => {
                    return Err(PipelineError::UnknownStage {
                        pipeline: text.to_owned(),
                        stage: raw.trim().to_owned(),
                        known: offered(registry).join(", "),
                    });
                }
            }
        }
        if pipeline.lower.len() > LOWER_STAGES_MAX {
            let most = LOWER_STAGES_MAX;
            return Err(bad(format!("at most {most} stages can stand below Dram")));
        }
        Ok(pipeline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Pipeline, PipelineError> {
        Pipeline::parse(text, &Registry::default())
    }

    #[test]
    fn sensible_orders_are_taken() {
        for (text, has_dram, lower) in [
            ("Dram", true, vec![]),
            ("dram | files", true, vec!["files"]),
            ("Cache|Posix", true, vec!["posix"]),
            ("Files", false, vec!["files"]),
            ("Empty", false, vec![]),
            ("Fake", false, vec!["fake"]),
            ("Dram|Files|Fake", true, vec!["files", "fake"]),
        ] {
            let pipeline = parse(text).unwrap();
            assert_eq!(
                (pipeline.has_dram, pipeline.lower),
                (has_dram, lower.iter().map(|s| (*s).to_owned()).collect()),
                "{text}"
            );
        }
    }

    #[test]
    fn an_absent_tier_is_dropped_and_says_so() {
        let pipeline = parse("Hbm|Dram|Peers|Files").unwrap();
        assert_eq!(pipeline.lower, ["files"]);
        assert_eq!(pipeline.notes.len(), 2);
        assert!(pipeline.notes[0].contains("Hbm"), "{:?}", pipeline.notes);
    }

    #[test]
    fn stages_for_studies_are_not_offered() {
        let error = parse("Dram|Filez").unwrap_err().to_string();
        assert!(error.contains("files") && !error.contains("fake"), "{error}");
        assert!(!error.contains("empty"), "{error}");
    }

    #[test]
    fn a_bad_chain_names_the_culprit() {
        for (text, culprit) in [
            ("Files|Dram", "Dram"),
            ("Dram|Dram", "Dram"),
            ("Dram|Filez", "Filez"),
            ("Dram||Files", "position 2"),
            ("", "position 1"),
            ("Dram|Files|Fake|Posix", "at most 2"),
            ("Files|files", "files"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(culprit), "{text}: {error}");
        }
    }
}
