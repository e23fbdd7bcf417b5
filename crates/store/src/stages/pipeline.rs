//! Pipelines: an ordered list of stages, such as `"Dram|Files"`.

use cascade_disk::TIER_NAME;
use cascade_memory::RegionKind;
use cascade_tier::{PipelineError, TierName};

use crate::core::catalog::LOWER_STAGES_MAX;
use crate::stages::StageRegistry;

/// Name of a tier that is not built yet.
const PEERS: &str = "peers";

/// Names of the tier of the store's own memory.
const DRAM: TierName = "dram";
const HBM: TierName = "hbm";

/// UCM's names of stages, and the names of these stages here.
const NAMES_OF_UCM: [(&str, &str); 2] = [("cache", DRAM), ("posix", TIER_NAME)];

/// Stages for benchmarks of hit rates and ceilings: valid, but not listed in error messages.
const FOR_BENCHMARKS: [&str; 2] = ["empty", "fake"];

/// The stages that error messages list.
fn listed_stages(registry: &StageRegistry) -> Vec<String> {
    let names = registry.names().into_iter();
    names.filter(|name| !FOR_BENCHMARKS.contains(&name.as_str())).collect()
}

/// A parsed and checked pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pipeline {
    /// Name of the tier of the store's own memory: `dram`, or `hbm` in the memory of a device. Also
    /// if no blocks are kept in it.
    pub memory: TierName,
    /// Whether blocks are kept in that memory.
    pub keeps_in_memory: bool,
    /// Names of the stages below it, in lower case, fast to slow.
    pub lower: Vec<String>,
    /// Notes on stages that were left out.
    pub notes: Vec<String>,
}

impl Pipeline {
    /// Parses and checks a pipeline. Names are case-insensitive. `Cache` is another name of `Dram`,
    /// `Posix` of `Files`.
    pub fn parse(text: &str, registry: &StageRegistry) -> Result<Self, PipelineError> {
        Self::parse_for(RegionKind::Host, text, registry)
    }

    /// As [`Self::parse`], for a store in the memory of a device: `Hbm` takes the place of `Dram`.
    pub fn parse_on_device(text: &str, registry: &StageRegistry) -> Result<Self, PipelineError> {
        Self::parse_for(RegionKind::Device, text, registry)
    }

    /// The tier of the store's own memory, if blocks are kept in it.
    pub(crate) fn memory_tier(&self) -> Option<TierName> {
        self.keeps_in_memory.then_some(self.memory)
    }

    /// As [`Self::parse`], for a store in this kind of memory. In that of a device, `Hbm` takes the
    /// place of `Dram`.
    pub(crate) fn parse_for(
        kind: RegionKind,
        text: &str,
        registry: &StageRegistry,
    ) -> Result<Self, PipelineError> {
        let bad = |reason: String| PipelineError::BadOrder { pipeline: text.to_owned(), reason };
        let memory = if kind == RegionKind::Host { DRAM } else { HBM };
        let mut pipeline =
            Self { memory, keeps_in_memory: false, lower: Vec::new(), notes: Vec::new() };
        for (position, raw) in text.split('|').enumerate() {
            let given = raw.trim().to_lowercase();
            let other = NAMES_OF_UCM.iter().find(|(name, _)| *name == given);
            let stage = other.map_or(given.as_str(), |(_, ours)| *ours);
            match stage {
                "" => {
                    return Err(bad(format!("the stage at position {} has no name", position + 1)));
                }
                DRAM if kind == RegionKind::Device => {
                    let name = raw.trim();
                    return Err(bad(format!(
                        "a store in device memory has no {name} yet; leave {name} out"
                    )));
                }
                name if name == memory => {
                    if pipeline.keeps_in_memory {
                        return Err(bad(format!("it has {} twice", raw.trim())));
                    }
                    if let Some(slower) = pipeline.lower.first() {
                        return Err(bad(format!("{} must come before {slower}", raw.trim())));
                    }
                    pipeline.keeps_in_memory = true;
                }
                "empty" => pipeline.notes.push("stage Empty stores no blocks".to_owned()),
                PEERS => {
                    let name = raw.trim();
                    return Err(bad(format!("tier {name} is not ready yet; leave {name} out")));
                }
                HBM => {
                    let note = format!("tier {} is not available here: left out", raw.trim());
                    pipeline.notes.push(note);
                }
                lower if pipeline.lower.iter().any(|other| other == lower) => {
                    return Err(bad(format!("it has {} twice", raw.trim())));
                }
                lower if registry.contains(lower) => pipeline.lower.push(lower.to_owned()),
                _ => {
                    return Err(PipelineError::UnknownStage {
                        pipeline: text.to_owned(),
                        stage: raw.trim().to_owned(),
                        known: listed_stages(registry).join(", "),
                    });
                }
            }
        }
        if pipeline.lower.len() > LOWER_STAGES_MAX {
            let (most, has) = (LOWER_STAGES_MAX, pipeline.lower.len());
            return Err(bad(format!(
                "it has {has} stages below Dram; at most {most} are possible"
            )));
        }
        Ok(pipeline)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::stages::FakeTier;

    fn parse(text: &str) -> Result<Pipeline, PipelineError> {
        Pipeline::parse(text, &StageRegistry::default())
    }

    #[test]
    fn valid_pipelines_are_parsed() {
        for (text, has_dram, lower) in [
            ("Dram", true, vec![]),
            ("dram | files", true, vec!["files"]),
            ("Cache|Posix", true, vec!["files"]),
            ("Files", false, vec!["files"]),
            ("Empty", false, vec![]),
            ("Fake", false, vec!["fake"]),
            ("Dram|Files|Fake", true, vec!["files", "fake"]),
        ] {
            let pipeline = parse(text).unwrap();
            assert_eq!(
                (pipeline.keeps_in_memory, pipeline.lower),
                (has_dram, lower.iter().map(|s| (*s).to_owned()).collect()),
                "{text}"
            );
        }
    }

    #[test]
    fn hbm_takes_the_place_of_dram_in_device_memory() {
        let registry = StageRegistry::default();
        let parse = |text: &str| Pipeline::parse_for(RegionKind::Device, text, &registry);
        let pipeline = parse("Hbm|Files").unwrap();
        assert_eq!((pipeline.memory, pipeline.keeps_in_memory), ("hbm", true));
        assert_eq!((pipeline.lower, pipeline.notes), (vec!["files".to_owned()], Vec::new()));
        for (text, message) in [
            ("Hbm|Dram|Files", "no Dram yet"),
            ("Cache", "no Cache yet"),
            ("Hbm|hbm", "hbm twice"),
            ("Files|Hbm", "Hbm must come before files"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn a_tier_without_its_device_is_left_out_with_a_note_and_one_that_is_not_built_is_refused() {
        let pipeline = parse("Hbm|Dram|Files").unwrap();
        assert_eq!(pipeline.lower, ["files"]);
        assert_eq!(pipeline.notes.len(), 1);
        assert!(pipeline.notes[0].contains("Hbm"), "{:?}", pipeline.notes);
        let error = parse("Hbm|Dram|Peers|Files").unwrap_err().to_string();
        assert!(error.contains("leave Peers out"), "{error}");
    }

    #[test]
    fn error_messages_do_not_list_stages_for_benchmarks() {
        let error = parse("Dram|Filez").unwrap_err().to_string();
        assert!(error.contains("files") && !error.contains("fake"), "{error}");
        assert!(!error.contains("empty"), "{error}");
    }

    #[test]
    fn the_error_of_an_invalid_pipeline_names_the_stage() {
        for (text, stage) in [
            ("Files|Dram", "Dram"),
            ("Dram|Dram", "Dram"),
            ("Dram|Filez", "Filez"),
            ("Dram||Files", "position 2"),
            ("", "position 1"),
            ("Files|files", "files"),
            ("Files|Posix", "Posix"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(stage), "{text}: {error}");
        }
    }

    #[test]
    fn more_stages_than_a_store_can_have_are_refused() {
        let mut registry = StageRegistry::default();
        let names: Vec<String> = (0..=LOWER_STAGES_MAX).map(|n| format!("tier{n}")).collect();
        for name in &names {
            registry.register(name, Arc::new(|_| Ok(Arc::new(FakeTier::default()))));
        }
        let parse = |count: usize| {
            Pipeline::parse(&format!("Dram|{}", names[..count].join("|")), &registry)
        };
        assert_eq!(parse(LOWER_STAGES_MAX).unwrap().lower, names[..LOWER_STAGES_MAX]);
        let error = parse(LOWER_STAGES_MAX + 1).unwrap_err().to_string();
        assert!(error.contains("8 stages below Dram; at most 7"), "{error}");
    }
}
