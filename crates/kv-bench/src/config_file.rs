//! `--config`: the original's `config.yaml`. Each setting is taken over, or has to be the one that
//! is built in; another value is refused by name.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use crate::KvBenchError;
use crate::autoscaler::ScaleSettings;
use crate::model_config::{MODEL_CONFIGS, ModelConfig};
use crate::qos::QosTargets;
use crate::recorded::CONTEXT_TOKENS_MAX;
use crate::settings_file::{Section, SettingsFile};
use crate::user_kind::UserKind;
use crate::workload_settings::WorkloadSettings;

/// The sections of the file.
const SECTIONS: [&str; 14] = [
    "user_templates",
    "generation_timing",
    "qos_profiles",
    "qos_distribution",
    "eviction",
    "gpu_backend",
    "prefix_cache",
    "rag",
    "conversation",
    "autoscaler",
    "decode",
    "sharegpt",
    "saturation_detection",
    "validation_limits",
];
/// Sections that have settings of one value, and the settings that are taken over.
const TAKEN: [(&str, &[&str]); 7] = [
    ("qos_distribution", &["interactive_probability", "responsive_threshold"]),
    ("prefix_cache", &["system_prompt_hit_probability"]),
    ("conversation", &["max_turns_per_conv", "end_conversation_probability"]),
    (
        "autoscaler",
        &[
            "min_users",
            "max_users",
            "scale_up_factor",
            "scale_down_factor",
            "consecutive_samples_required",
        ],
    ),
    ("decode", &["batch_size"]),
    ("saturation_detection", &["read_latency_p95_threshold_ms", "write_latency_p95_threshold_ms"]),
    (
        "validation_limits",
        &["max_users", "max_duration_seconds", "max_gpu_memory_gb", "max_cpu_memory_gb"],
    ),
];
/// Settings that are built in, with their values.
const BUILT_IN: [(&str, &[(&str, f64)]); 7] = [
    (
        "eviction",
        &[
            ("max_recursion_depth", 10.0),
            ("target_usage_ratio", 0.8),
            ("large_entry_limit_ratio", 0.95),
            ("max_evictions_hard_cap", 5000.0),
            ("max_evictions_min", 1000.0),
        ],
    ),
    (
        "gpu_backend",
        &[
            ("memory_fraction", 0.9),
            ("max_eviction_attempts", 100.0),
            ("free_memory_threshold", 0.1),
        ],
    ),
    ("prefix_cache", &[("min_prefix_length", 50.0), ("max_prefix_entries", 1000.0)]),
    (
        "rag",
        &[
            ("chunk_size_tokens", 512.0),
            ("top_k_chunks", 5.0),
            ("max_chunk_bytes", 268_435_456.0),
            ("request_probability", 0.1),
            ("max_documents", 0.0),
            ("large_model_doc_tokens_min", 1024.0),
            ("large_model_doc_tokens_max", 4096.0),
            ("small_model_doc_tokens_min", 4000.0),
            ("small_model_doc_tokens_max", 12_000.0),
        ],
    ),
    ("conversation", &[("max_conversations", 1000.0)]),
    (
        "sharegpt",
        &[
            ("max_context_tokens", 8192.0),
            ("max_generation_tokens", 2048.0),
            ("chars_per_token_estimate", 4.0),
        ],
    ),
    ("saturation_detection", &[("queue_depth_threshold", 100.0), ("history_window_size", 10.0)]),
];
/// The one setting of them that is a text.
const DISTRIBUTION: (&str, &str) = ("retrieval_distribution", "zipfian");
/// The users that are simulated, and the classes, in the order of their numbers.
const USER_KINDS: [&str; 3] = ["chatbot", "coding", "document"];
const CLASSES: [&str; 3] = ["interactive", "responsive", "batch"];
const MODES: [&str; 3] = ["none", "fast", "realistic"];
const MS_MAX: u64 = 3_600_000;

/// What a configuration file says.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigFile {
    /// Settings of users, classes and conversations.
    pub settings: WorkloadSettings,
    /// Settings of autoscaling.
    pub scaling: ScaleSettings,
    /// Time for a generated token: with none, fast and realistic generation.
    pub token_times: [Duration; 3],
    /// What the command line may ask for at most.
    pub limits: Limits,
    /// The model of `--model`, if the file describes it.
    pub model: Option<ModelConfig>,
}

/// Limits of the command line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Most users.
    pub users: u64,
    /// Longest window in seconds.
    pub duration_seconds: u64,
    /// Most GiB of GPU memory.
    pub gpu_gib: f64,
    /// Most GiB of DRAM.
    pub cpu_gib: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { users: 100_000, duration_seconds: 86_400, gpu_gib: 131_072.0, cpu_gib: 131_072.0 }
    }
}

impl Default for ConfigFile {
    fn default() -> Self {
        Self {
            settings: WorkloadSettings::default(),
            scaling: ScaleSettings::default(),
            token_times: [0, 2, 30].map(Duration::from_millis),
            limits: Limits::default(),
            model: None,
        }
    }
}

impl ConfigFile {
    /// Reads a file. `model` is the name of the model of the run.
    ///
    /// # Errors
    /// If a setting is unknown, has another form, or cannot be changed.
    pub fn read(path: &Path, model: &str) -> Result<Self, KvBenchError> {
        let file = SettingsFile::read("--config", path)?;
        let top = file.section();
        top.check_names(&SECTIONS.into_iter().chain([MODEL_CONFIGS]).collect::<Vec<_>>())?;
        let mut config = Self::default();
        for section in SECTIONS {
            check_built_in(&top, section)?;
        }
        config.settings.take(&top)?;
        config.scaling.take(&top)?;
        if let Some(times) = top.below("generation_timing")? {
            times.check_names(&MODES)?;
            for (name, time) in MODES.into_iter().zip(&mut config.token_times) {
                let seconds = times.number(name, 0.0..=60.0)?;
                *time = seconds.map_or(*time, Duration::from_secs_f64);
            }
        }
        config.limits.take(&top)?;
        if let Some(models) = top.below(MODEL_CONFIGS)? {
            config.model = ModelConfig::of_section(&models, model)?;
        }
        Ok(config)
    }
}

/// Refuses another value than the one that is built in, and names that are not known.
fn check_built_in(top: &Section<'_>, section: &str) -> Result<(), KvBenchError> {
    let built_in = BUILT_IN.iter().find(|(name, _)| *name == section).map_or(&[][..], |it| it.1);
    let taken = TAKEN.iter().find(|(name, _)| *name == section).map_or(&[][..], |it| it.1);
    let Some(values) = top.below(section)?.filter(|_| built_in.len() + taken.len() > 0) else {
        return Ok(());
    };
    let mut known: Vec<&str> = taken.to_vec();
    known.extend(built_in.iter().map(|(name, _)| *name));
    let (text_name, text) = DISTRIBUTION;
    if section == "rag" {
        known.push(text_name);
        let found = values.text(text_name)?.unwrap_or(text);
        if found != text {
            return Err(unchangeable(&values, text_name, &text, &found));
        }
    }
    values.check_names(&known)?;
    for (name, expected) in built_in {
        let found = values.number(name, f64::MIN..=f64::MAX)?.unwrap_or(*expected);
        if (found - expected).abs() > 1e-9 {
            return Err(unchangeable(&values, name, expected, &found));
        }
    }
    Ok(())
}

fn unchangeable(
    values: &Section<'_>,
    name: &str,
    expected: &dyn std::fmt::Display,
    found: &dyn std::fmt::Display,
) -> KvBenchError {
    values.error(
        name,
        format!("{expected} is built in, and {found} cannot be chosen"),
        format!("set it to {expected}, or take it out"),
    )
}

impl WorkloadSettings {
    fn take(&mut self, top: &Section<'_>) -> Result<(), KvBenchError> {
        if let Some(kinds) = top.below("user_templates")? {
            kinds.check_names(&USER_KINDS)?;
            for (name, kind) in USER_KINDS.into_iter().zip(&mut self.kinds) {
                if let Some(values) = kinds.below(name)? {
                    kind.take(&values)?;
                }
            }
        }
        self.take_classes(top)?;
        if let Some(values) = top.below("prefix_cache")? {
            let share = values.number("system_prompt_hit_probability", 0.0..=1.0)?;
            self.prompt_share = share.unwrap_or(self.prompt_share);
        }
        if let Some(values) = top.below("conversation")? {
            let turns = whole(&values, "max_turns_per_conv", 1..=1_000_000)?;
            self.turns_max = turns.unwrap_or(self.turns_max);
            let ends = values.number("end_conversation_probability", 0.0..=1.0)?;
            self.continues = ends.map_or(self.continues, |ends| 1.0 - ends);
        }
        if let Some(values) = top.below("decode")? {
            let tokens = values.whole("batch_size", 1..=1_000_000)?;
            self.tokens_per_decode_read = tokens.unwrap_or(self.tokens_per_decode_read);
        }
        Ok(())
    }

    fn take_classes(&mut self, top: &Section<'_>) -> Result<(), KvBenchError> {
        if let Some(values) = top.below("qos_distribution")? {
            let interactive = values.number("interactive_probability", 0.0..=1.0)?;
            let attended = values.number("responsive_threshold", 0.0..=1.0)?;
            self.interactive_share = interactive.unwrap_or(self.interactive_share);
            self.attended_share = attended.unwrap_or(self.attended_share);
        }
        let Some(classes) = top.below("qos_profiles")? else { return Ok(()) };
        classes.check_names(&CLASSES)?;
        for (at, (name, targets)) in CLASSES.into_iter().zip(&mut self.targets).enumerate() {
            if let Some(values) = classes.below(name)? {
                take_targets(&values, targets, 3 - at)?;
            }
        }
        Ok(())
    }
}

/// The order of the classes is built in.
fn take_targets(
    values: &Section<'_>,
    targets: &mut QosTargets,
    priority: usize,
) -> Result<(), KvBenchError> {
    let names = [
        ("target_latency_p95_ms", &mut targets.ms_p95),
        ("target_latency_p99_ms", &mut targets.ms_p99),
        ("target_latency_p999_ms", &mut targets.ms_p999),
        ("target_latency_p9999_ms", &mut targets.ms_p9999),
    ];
    let known: Vec<&str> = names.iter().map(|(name, _)| *name).chain(["priority"]).collect();
    values.check_names(&known)?;
    for (name, target) in names {
        *target = values.whole(name, 1..=MS_MAX)?.unwrap_or(*target);
    }
    match values.whole("priority", 0..=u64::MAX)? {
        Some(found) if found != priority as u64 => {
            Err(unchangeable(values, "priority", &priority, &found))
        }
        _ => Ok(()),
    }
}

impl UserKind {
    fn take(&mut self, values: &Section<'_>) -> Result<(), KvBenchError> {
        values.check_names(&["context_range", "generation_range", "think_time_range"])?;
        // A whole number that was checked to be small.
        let narrow = |(least, most): (u64, u64)| {
            (u32::try_from(least).unwrap_or(u32::MAX), u32::try_from(most).unwrap_or(u32::MAX))
        };
        let context = values.whole_range("context_range", 1..=CONTEXT_TOKENS_MAX)?;
        self.context = context.map_or(self.context, narrow);
        let generated = values.whole_range("generation_range", 1..=100_000)?;
        self.generated = generated.map_or(self.generated, narrow);
        let think = values.range("think_time_range", 0.0..=3600.0)?;
        let ms = |seconds: f64| {
            u32::try_from(Duration::from_secs_f64(seconds).as_millis()).unwrap_or(u32::MAX)
        };
        self.think_ms = think.map_or(self.think_ms, |(least, most)| (ms(least), ms(most)));
        Ok(())
    }
}

impl ScaleSettings {
    fn take(&mut self, top: &Section<'_>) -> Result<(), KvBenchError> {
        if let Some(values) = top.below("autoscaler")? {
            let users = whole(&values, "min_users", 1..=100_000)?;
            self.users_min = users.unwrap_or(self.users_min);
            let users = whole(&values, "max_users", u64::from(self.users_min)..=100_000)?;
            self.users_max = users.unwrap_or(self.users_max);
            let factor = values.number("scale_up_factor", 1.01..=10.0)?;
            self.up_factor = factor.unwrap_or(self.up_factor);
            let factor = values.number("scale_down_factor", 0.01..=0.99)?;
            self.down_factor = factor.unwrap_or(self.down_factor);
            let samples = whole(&values, "consecutive_samples_required", 1..=1000)?;
            self.agreeing = samples.unwrap_or(self.agreeing);
        }
        if let Some(values) = top.below("saturation_detection")? {
            let limit = 0.001..=1e6;
            let read = values.number("read_latency_p95_threshold_ms", limit.clone())?;
            self.read_ms_max = read.unwrap_or(self.read_ms_max);
            let write = values.number("write_latency_p95_threshold_ms", limit)?;
            self.write_ms_max = write.unwrap_or(self.write_ms_max);
        }
        Ok(())
    }
}

impl Limits {
    fn take(&mut self, top: &Section<'_>) -> Result<(), KvBenchError> {
        let Some(values) = top.below("validation_limits")? else { return Ok(()) };
        self.users = values.whole("max_users", 1..=self.users)?.unwrap_or(self.users);
        let seconds = values.whole("max_duration_seconds", 1..=self.duration_seconds)?;
        self.duration_seconds = seconds.unwrap_or(self.duration_seconds);
        self.gpu_gib =
            values.number("max_gpu_memory_gb", 0.0..=self.gpu_gib)?.unwrap_or(self.gpu_gib);
        self.cpu_gib =
            values.number("max_cpu_memory_gb", 0.0..=self.cpu_gib)?.unwrap_or(self.cpu_gib);
        Ok(())
    }

    /// Refuses a command line that asks for more.
    ///
    /// # Errors
    /// If it does.
    pub fn check(
        &self,
        users: u32,
        duration_seconds: u64,
        (gpu_gib, cpu_gib): (f64, f64),
    ) -> Result<(), KvBenchError> {
        let asked = [
            ("--num-users", f64::from(users), self.users as f64, "max_users"),
            (
                "--duration",
                duration_seconds as f64,
                self.duration_seconds as f64,
                "max_duration_seconds",
            ),
            ("--gpu-mem-gb", gpu_gib, self.gpu_gib, "max_gpu_memory_gb"),
            ("--cpu-mem-gb", cpu_gib, self.cpu_gib, "max_cpu_memory_gb"),
        ];
        match asked.into_iter().find(|(_, asked, most, _)| asked > most) {
            None => Ok(()),
            Some((option, asked, most, name)) => Err(KvBenchError::usage(
                format!("{option} {asked} is more than the limit of --config, {most}"),
                format!("lower it, or raise `validation_limits.{name}` in the file"),
            )),
        }
    }
}

/// A whole number within bounds that fit into 32 bits.
fn whole(
    values: &Section<'_>,
    name: &str,
    bounds: RangeInclusive<u64>,
) -> Result<Option<u32>, KvBenchError> {
    let number = values.whole(name, bounds)?;
    Ok(number.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;
    use crate::qos::QosClass;

    fn read(text: &str) -> Result<ConfigFile, String> {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("config.yaml");
        fs::write(&path, text).unwrap();
        ConfigFile::read(&path, "mine").map_err(|error| error.to_string())
    }

    /// All settings of the original's file, with its values.
    const ORIGINAL: &str = "
user_templates:
  chatbot: {context_range: [512, 4096], generation_range: [50, 200], think_time_range: [0.1, 0.5]}
  coding: {context_range: [4096, 25000], generation_range: [100, 500], think_time_range: [0.2, 1.0]}
  document:
    context_range: [4096, 16384]
    generation_range: [200, 800]
    think_time_range: [0.3, 1.5]
generation_timing: {none: 0.0, fast: 0.002, realistic: 0.030}
qos_profiles:
  interactive: {target_latency_p95_ms: 50, target_latency_p99_ms: 100,
    target_latency_p999_ms: 150, target_latency_p9999_ms: 200, priority: 3}
  responsive: {target_latency_p95_ms: 100, target_latency_p99_ms: 200,
    target_latency_p999_ms: 350, target_latency_p9999_ms: 500, priority: 2}
  batch: {target_latency_p95_ms: 1000, target_latency_p99_ms: 5000,
    target_latency_p999_ms: 7500, target_latency_p9999_ms: 10000, priority: 1}
qos_distribution: {interactive_probability: 0.15, responsive_threshold: 0.50}
eviction: {max_recursion_depth: 10, target_usage_ratio: 0.8, large_entry_limit_ratio: 0.95,
  max_evictions_hard_cap: 5000, max_evictions_min: 1000}
gpu_backend: {memory_fraction: 0.9, max_eviction_attempts: 100, free_memory_threshold: 0.1}
prefix_cache: {min_prefix_length: 50, max_prefix_entries: 1000, system_prompt_hit_probability: 0.2}
rag: {chunk_size_tokens: 512, top_k_chunks: 5, max_chunk_bytes: 268435456,
  request_probability: 0.1, retrieval_distribution: \"zipfian\", max_documents: 0,
  large_model_doc_tokens_min: 1024, large_model_doc_tokens_max: 4096,
  small_model_doc_tokens_min: 4000, small_model_doc_tokens_max: 12000}
conversation: {max_conversations: 1000, max_turns_per_conv: 50, end_conversation_probability: 0.2}
autoscaler: {min_users: 1, max_users: 10000, scale_up_factor: 1.2, scale_down_factor: 0.8,
  consecutive_samples_required: 2}
decode: {batch_size: 32}
sharegpt: {max_context_tokens: 8192, max_generation_tokens: 2048, chars_per_token_estimate: 4}
saturation_detection: {read_latency_p95_threshold_ms: 100, write_latency_p95_threshold_ms: 50,
  queue_depth_threshold: 100, history_window_size: 10}
validation_limits: {max_users: 100000, max_duration_seconds: 86400, max_gpu_memory_gb: 1024,
  max_cpu_memory_gb: 16384}
model_configs:
  mine: {num_layers: 2, kv_heads: 8, kv_dim_per_head: 128}
";

    #[test]
    fn the_file_of_the_original_changes_nothing_but_the_limits_of_memory() {
        let config = read(ORIGINAL).unwrap();
        assert_eq!(config.model.as_ref().unwrap().geometry.bytes_per_token(), 8192);
        let limits = Limits { gpu_gib: 1024.0, cpu_gib: 16_384.0, ..Limits::default() };
        let model = config.model.clone();
        assert_eq!(config, ConfigFile { limits, model, ..ConfigFile::default() });
    }

    #[test]
    fn settings_that_are_taken_over_replace_the_defaults() {
        let config = read(
            "user_templates: {coding: {context_range: [10, 20], think_time_range: [0, 0.25]}}\n\
             generation_timing: {fast: 0.5}\n\
             qos_profiles: {batch: {target_latency_p95_ms: 77}}\n\
             qos_distribution: {interactive_probability: 0.5, responsive_threshold: 1}\n\
             prefix_cache: {system_prompt_hit_probability: 1}\n\
             conversation: {max_turns_per_conv: 3, end_conversation_probability: 0.75}\n\
             autoscaler: {min_users: 2, max_users: 9, scale_up_factor: 2,\n  \
             scale_down_factor: 0.5, consecutive_samples_required: 1}\n\
             saturation_detection: {read_latency_p95_threshold_ms: 7.5}\n\
             decode: {batch_size: 8}\n\
             validation_limits: {max_users: 5}\n",
        )
        .unwrap();
        let settings = config.settings;
        let coding = settings.kinds[1];
        assert_eq!((coding.context, coding.generated), ((10, 20), (100, 500)));
        assert_eq!(
            (coding.think_ms, settings.kinds[0]),
            ((0, 250), WorkloadSettings::default().kinds[0])
        );
        assert_eq!(config.token_times[1], Duration::from_millis(500));
        assert_eq!((settings.targets[2].ms_p95, settings.targets[2].ms_p99), (77, 5000));
        let classes = [0.0, 0.49, 0.51, 0.999].map(|share| settings.class(share));
        let (one, two) = (QosClass::Interactive, QosClass::Responsive);
        assert_eq!(classes, [one, one, two, two]);
        assert!((settings.prompt_share - 1.0).abs() + (settings.continues - 0.25).abs() < 1e-9);
        assert_eq!((settings.turns_max, settings.tokens_per_decode_read), (3, 8));
        let scaling = config.scaling;
        assert_eq!((scaling.users_min, scaling.users_max, scaling.agreeing), (2, 9, 1));
        assert!((scaling.read_ms_max - 7.5).abs() < 1e-9);
        let limits = config.limits;
        assert!(limits.check(5, 60, (16.0, 32.0)).is_ok());
        let refused = limits.check(6, 60, (16.0, 32.0)).unwrap_err().to_string();
        assert!(
            refused.contains("--num-users 6 is more than the limit of --config, 5"),
            "{refused}"
        );
    }

    #[test]
    fn what_is_built_in_unknown_or_of_another_form_is_refused_by_name() {
        for (text, part) in [
            ("a: 3", "field `a`: there is no such setting"),
            ("rag: {top_k_chunks: 7}", "field `rag.top_k_chunks`: 5 is built in, and 7 cannot be"),
            (
                "rag: {retrieval_distribution: uniform}",
                "field `rag.retrieval_distribution`: zipfian is built in, and uniform cannot",
            ),
            ("rag: {chunks: 7}", "field `rag.chunks`: there is no such setting"),
            (
                "eviction: {target_usage_ratio: 0.9}",
                "0.8 is built in, and 0.9 cannot be chosen\n  set it to 0.8, or take it out",
            ),
            (
                "qos_profiles: {batch: {priority: 9}}",
                "field `qos_profiles.batch.priority`: 1 is built in, and 9 cannot be chosen",
            ),
            ("qos_profiles: {gold: {priority: 9}}", "field `qos_profiles.gold`: there is no such"),
            (
                "decode: {batch_size: 0}",
                "field `decode.batch_size`: expected a whole number from 1",
            ),
            ("decode: 3", "field `decode`: expected named values below it"),
            (
                "user_templates: {chatbot: {context_range: [9, 2]}}",
                "`user_templates.chatbot.context_range`: expected two whole numbers from 1 to \
                 32768, the smaller one first, found [9,2]",
            ),
            (
                "user_templates: {chatbot: {think_time_range: 3}}",
                "think_time_range`: expected two numbers from 0 to 3600",
            ),
            ("validation_limits: {max_users: 200000}", "a whole number from 1 to 100000"),
            ("autoscaler: {min_users: 5, max_users: 4}", "a whole number from 5 to 100000"),
            ("model_configs: {mine: {num_layers: 3}}", "`model_configs.mine.kv_heads`: missing"),
        ] {
            let refused = read(text).unwrap_err();
            assert!(refused.contains(part), "{part} is not in {refused}");
        }
    }
}
