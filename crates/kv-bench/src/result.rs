//! The result file: the keys of the original, and ours under `cascade`.

use std::collections::BTreeMap;

use cascade_replay::environment::Environment;
use cascade_store::StoreStats;
use serde_json::{Map, Value, json};

use crate::GIB;
use crate::backend::KvTier;
use crate::compatible::figures::ObjectFigures;
use crate::compatible::plan::COUNTED_PROMPT_TOKENS;
use crate::compatible::waterfall::TierContents;
use crate::criteria::Assessment;
use crate::histogram::{LatencyHistogram, Percentiles};
use crate::measurements::{Measurements, Moved};
use crate::plan::{PROMPT_TOKENS, Workload};
use crate::qos::QosClass;
use crate::recorded::CONTEXT_TOKENS_MAX;
use crate::run::{RunOptions, RunOutcome};
use crate::store_backend::TierSizes;
use crate::validity::Validity;

/// The figures of what kept the KV.
#[derive(Debug)]
pub enum Detail {
    /// Cascade's store.
    Store {
        /// Statistics of the store after the run.
        stats: Box<StoreStats>,
        /// Statistics of the simulated GPU tier.
        gpu_stats: Option<Box<StoreStats>>,
    },
    /// Whole entries, as in the original.
    Objects(Box<ObjectFigures>),
}

/// What a run was, did and found.
#[derive(Debug)]
pub struct KvResult {
    /// What was to be done.
    pub workload: Workload,
    /// How it was driven.
    pub options: RunOptions,
    /// `none`, `fast` or `realistic`.
    pub generation_mode: &'static str,
    /// The sizes of the tiers.
    pub sizes: TierSizes,
    /// What happened.
    pub outcome: RunOutcome,
    /// What kept the KV.
    pub detail: Detail,
    /// Whether its limits are kept.
    pub assessment: Assessment,
    /// Whether its figures can be trusted.
    pub validity: Validity,
    /// The machine and the build.
    pub environment: Environment,
}

impl KvResult {
    /// The figures.
    pub fn figures(&self) -> &Measurements {
        &self.outcome.figures
    }

    /// Length of the window in seconds.
    pub fn seconds(&self) -> f64 {
        self.outcome.window.seconds()
    }

    /// Bytes within the window in GiB a second.
    pub fn gib_per_second(&self, window_bytes: u64) -> f64 {
        ratio(window_bytes as f64 / GIB, self.seconds())
    }

    /// The bytes that its rates count: those within the window, or all of them as in the original.
    pub fn counted(&self, moved: Moved) -> u64 {
        match self.detail {
            Detail::Store { .. } => moved.window_bytes,
            Detail::Objects(_) => moved.bytes,
        }
    }

    /// Bytes that were written, by tier. Cascade's store writes through all of them.
    pub fn written_by_tier(&self) -> [Moved; 3] {
        let has = [self.sizes.gpu_bytes > 0, self.sizes.cpu_bytes > 0, true];
        match &self.detail {
            Detail::Store { .. } => {
                has.map(|has| if has { self.figures().written } else { Moved::default() })
            }
            Detail::Objects(objects) => objects.written,
        }
    }

    /// What each tier contains after the run.
    pub fn tier_contents(&self) -> [TierContents; 3] {
        let (stats, gpu) = match &self.detail {
            Detail::Store { stats, gpu_stats } => (stats, gpu_stats),
            Detail::Objects(objects) => return objects.contents,
        };
        let dram = |stats: &StoreStats| TierContents {
            entries: stats.dram_blocks,
            bytes: stats.dram_bytes,
        };
        let cpu = if self.sizes.cpu_bytes > 0 { dram(stats) } else { TierContents::default() };
        let files = TierContents {
            entries: stats.stage_blocks.first().copied().unwrap_or(0),
            bytes: stats.stages.first().map_or(0, |(_, stage)| stage.used_bytes),
        };
        [gpu.as_deref().map_or_else(TierContents::default, dram), cpu, files]
    }

    /// Processor time of this process for each GiB read or written: all of it, and without making
    /// and comparing bytes.
    pub fn cpu_seconds_per_gib(&self) -> (f64, f64) {
        let figures = self.figures();
        let gib = (figures.read_total().bytes + figures.written.bytes) as f64 / GIB;
        let (all, payload) = (self.outcome.kernel.cpu, figures.payload);
        let store = all.saturating_sub(payload);
        (ratio(all.as_secs_f64(), gib), ratio(store.as_secs_f64(), gib))
    }

    /// The parts of the run that are simulated.
    pub fn simulated(&self) -> Vec<&'static str> {
        let mut parts = Vec::new();
        if self.log().is_some() {
            return vec!["all tiers, and time: operations take none"];
        }
        if !self.options.token_time.is_zero() {
            parts.push("token generation: time passes, nothing is computed");
        }
        if self.sizes.gpu_bytes > 0 {
            parts.push("GPU tier: host memory stands for the memory of a GPU");
        }
        parts
    }

    /// The result file.
    pub fn to_json(&self) -> Value {
        let figures = self.figures();
        let samples = &figures.samples;
        let mut all = json!({
            "requests_completed": figures.requests,
            "total_tokens_generated": figures.tokens,
            "total_storage_io_latency": figures.storage.sum().as_secs_f64(),
            "total_generation_latency": figures.generation.sum().as_secs_f64(),
            "end_to_end_latencies": samples.end_to_end.kept(),
            "storage_latencies": samples.storage.kept(),
            "generation_latencies": samples.generation.kept(),
            "prefill_latencies": samples.prefill.kept(),
            "decode_latencies": samples.decode.kept(),
            "throughput_timeline": self.throughput_timeline(),
            "multi_turn_cache_hits": figures.turn_hits,
            "multi_turn_cache_misses": figures.turn_misses,
            "seed": self.workload.seed,
            "summary": self.summary(),
            "cascade": self.ours(),
        });
        self.hide_unmeasured(&mut all);
        all
    }

    /// Tokens a second from the start to the end of each slice, as in the original.
    fn throughput_timeline(&self) -> Vec<Value> {
        let mut tokens = 0;
        let slices = self.figures().timeline.slices().into_iter();
        let points = slices.map(|(end, slice)| {
            tokens += slice.tokens;
            json!({
                "timestamp": end,
                "throughput_tokens_per_sec": ratio(tokens as f64, end),
            })
        });
        points.collect()
    }

    fn summary(&self) -> Value {
        let figures = self.figures();
        let seconds = self.seconds();
        let storage_seconds = figures.storage.sum().as_secs_f64();
        let turns = figures.turn_hits + figures.turn_misses;
        json!({
            "total_requests": figures.requests,
            "total_tokens": figures.tokens,
            "elapsed_time": seconds,
            "avg_throughput_tokens_per_sec": ratio(figures.tokens as f64, seconds),
            "total_storage_io_time": storage_seconds,
            "storage_throughput_tokens_per_sec": ratio(figures.tokens as f64, storage_seconds),
            "requests_per_second": ratio(figures.requests as f64, seconds),
            "end_to_end_latency_ms": figures.end_to_end.percentiles(),
            "storage_io_latency_ms": figures.storage.percentiles(),
            "generation_latency_ms": figures.generation.percentiles(),
            "cache_stats": self.cache_stats(),
            "qos_metrics": self.qos_metrics(),
            "prefix_cache_stats": {
                "prefix_hits": figures.prompt_requests[0],
                "prefix_misses": figures.prompt_requests[1],
                "system_prompt_reuse": figures.prompt_requests[0],
                "common_phrase_reuse": 0,
                "bytes_saved": figures.prompt_bytes_saved,
            },
            "autoscaling_stats":
                self.outcome.scaling.as_ref().map_or(Vec::new(), |it| it.events.clone()),
            "autoscaling_summary": self.autoscaling_summary(),
            "multi_turn_stats": {
                "cache_hits": figures.turn_hits,
                "cache_misses": figures.turn_misses,
                "hit_rate": ratio(figures.turn_hits as f64, turns as f64),
            },
        })
    }

    fn autoscaling_summary(&self) -> Value {
        let Some(scaling) = &self.outcome.scaling else { return Value::Null };
        let peak = scaling.peak;
        json!({
            "initial_users": scaling.initial_users,
            "final_users": scaling.users,
            "total_scale_events": scaling.events.len(),
            "peak_user_count": peak.map(|(_, _, users)| users),
            "peak_throughput_tokens_per_sec": peak.map(|(_, tokens, _)| tokens),
            "peak_gib_per_second": peak.map(|(gib, ..)| gib),
        })
    }

    fn cache_stats(&self) -> Value {
        let figures = self.figures();
        let read = figures.read_total();
        let [gpu, cpu, files] = self.tier_contents();
        let (offloads_cpu, offloads_storage) = self.offloads();
        let mut all = object(json!({
            "cache_hit_rate": figures.hit_rate().unwrap_or(0.0),
            "cache_hits": figures.hits,
            "cache_misses": figures.misses,
            "gpu_entries": gpu.entries,
            "cpu_entries": cpu.entries,
            "storage_entries": files.entries,
            "gpu_memory_used_gb": gib(gpu.bytes),
            "cpu_memory_used_gb": gib(cpu.bytes),
            "offloads_cpu": offloads_cpu,
            "offloads_storage": offloads_storage,
            "storage_health": self.stated_assessment(),
            "prefill_writes": figures.prefills,
            "decode_reads": figures.decode_reads,
            "system_prompt_hits": figures.prompt_hits,
            "common_phrase_hits": 0,
            "user_cache_hits": figures.decode_hits,
            "multi_turn_hits": figures.turn_hits,
            "total_read_bytes": read.bytes,
            "total_write_bytes": figures.written.bytes,
            "total_read_gb": gib(read.bytes),
            "total_write_gb": gib(figures.written.bytes),
            "read_write_ratio": ratio(read.bytes as f64, figures.written.bytes as f64),
            "read_iops": figures.read_blocks - figures.misses,
            "write_iops": figures.written_blocks,
            "storage_tokens_processed": self.storage_tokens(),
        }));
        self.add_tiers(&mut all);
        let storage = &figures.read_by_tier[KvTier::Storage.index()];
        let write =
            self.objects().map_or(&figures.write, |it| &it.write_by_tier[KvTier::Storage.index()]);
        add_percentiles(&mut all, "storage_read", storage);
        add_percentiles(&mut all, "storage_write", write);
        // A store does not measure the parts: a transfer and its checksum overlap.
        let unknown = LatencyHistogram::default();
        let parts = self.objects().map_or([&unknown; 4], ObjectFigures::parts);
        for (name, histogram) in PARTS.into_iter().zip(parts) {
            add_percentiles(&mut all, name, histogram);
        }
        // The founding document's names of the same figures.
        let renamed = all.iter().filter_map(|(name, value)| {
            let rest = name.strip_prefix("storage_").filter(|rest| *rest != "health")?;
            Some((format!("nvme_{rest}"), value.clone()))
        });
        let renamed: Vec<(String, Value)> = renamed.collect();
        all.extend(renamed);
        Value::Object(all)
    }

    fn add_tiers(&self, all: &mut Map<String, Value>) {
        let figures = self.figures();
        let all_written = self.written_by_tier();
        for tier in KvTier::ALL {
            let read = figures.read[tier.index()];
            let written = all_written[tier.index()];
            for (direction, moved) in [("read", read), ("written", written)] {
                let name = format!("tier_{}_kv_bytes_{direction}_gb", tier.name());
                all.insert(name, json!(gib(moved.bytes)));
            }
            for (direction, moved) in [("read", read), ("write", written)] {
                let name = format!("tier_{}_{direction}_bandwidth_gbps", tier.name());
                all.insert(name, json!(self.gib_per_second(self.counted(moved))));
            }
            if tier != KvTier::Storage {
                let histogram = &figures.read_by_tier[tier.index()];
                add_percentiles(all, &format!("{}_read", tier.name()), histogram);
                if let Some(objects) = self.objects() {
                    let histogram = &objects.write_by_tier[tier.index()];
                    add_percentiles(all, &format!("{}_write", tier.name()), histogram);
                }
            }
        }
    }

    fn qos_metrics(&self) -> Value {
        let classes = QosClass::ALL.into_iter().map(|class| {
            let latency = &self.figures().classes[class.index()].latency;
            let targets = self.workload.settings.targets[class.index()];
            let limit = std::time::Duration::from_millis(targets.ms_p95);
            let actual = latency.ms_at(0.95);
            let metrics = json!({
                "total_requests": latency.count(),
                "no_data": latency.count() == 0,
                "latency_ms": latency.percentiles(),
                "sla": {
                    "target_p95_ms": targets.ms_p95,
                    "actual_p95_ms": actual,
                    "compliance": latency.share_within(limit),
                    "met": actual.map(|actual| actual <= targets.ms_p95 as f64),
                },
            });
            (class.name().to_owned(), metrics)
        });
        Value::Object(classes.collect())
    }

    fn ours(&self) -> Value {
        let (outcome, figures) = (&self.outcome, self.figures());
        let read = figures.read_total();
        let (cpu_all, cpu_store) = self.cpu_seconds_per_gib();
        let samples = &figures.samples;
        let starved: Vec<&str> =
            figures.starved_classes().into_iter().map(QosClass::name).collect();
        json!({
            "mode": self.mode(),
            "assessment": self.assessment,
            "validity": self.validity,
            "is_partial": outcome.was_stopped || outcome.gave_up,
            "window": {
                "seconds": self.seconds(),
                "planned_seconds": self.options.duration.as_secs_f64(),
                "tail_seconds": outcome.tail.as_secs_f64(),
                "cut_requests": figures.cut_requests,
            },
            "workload": self.workload_facts(),
            "tiers": self.tier_facts(),
            "rates": self.rates(|moved| moved.window_bytes),
            "rates_with_tail": self.objects().map(|_| self.rates(|moved| moved.bytes)),
            "bytes": {
                "read": read.bytes,
                "read_in_window": read.window_bytes,
                "written": figures.written.bytes,
                "written_in_window": figures.written.window_bytes,
                "recomputed_after_misses": figures.recomputed.bytes,
            },
            "operations": {
                "digest": figures.operations.text(),
                "count": figures.operations.count,
                "bytes": figures.operations.bytes,
            },
            "verification": self.verification(),
            "failures": figures.failures,
            "latency_ms": self.latencies(),
            "classes_without_requests": starved,
            "cpu": {
                "seconds": outcome.kernel.cpu.as_secs_f64(),
                "payload_seconds": figures.payload.as_secs_f64(),
                "seconds_per_gib": cpu_all,
                "seconds_per_gib_without_payload": cpu_store,
            },
            "kernel_io": outcome.kernel.process,
            "device": outcome.kernel.device,
            "samples": {
                "end_to_end_latencies": samples.end_to_end.counts(),
                "storage_latencies": samples.storage.counts(),
                "generation_latencies": samples.generation.counts(),
                "prefill_latencies": samples.prefill.counts(),
                "decode_latencies": samples.decode.counts(),
            },
            "timeline": {
                "slice_seconds": figures.timeline.slice_seconds(),
                "slices": figures.timeline.slices().iter().map(|(_, it)| it).collect::<Vec<_>>(),
            },
            "simulated": self.simulated(),
            "not_measured": self.not_measured(),
            "notes": self.notes(),
            "store": self.store_counters(),
            "objects": self.object_facts(),
            "io_trace_log": self.log_facts(),
            "environment": self.environment,
        })
    }

    fn verification(&self) -> Value {
        let figures = self.figures();
        json!({
            "is_on": self.options.verifies,
            "blocks": figures.verified_blocks,
            "wrong_blocks": figures.wrong_blocks,
            "wrong_examples": figures.wrong_examples,
            "last_blocks_read_again": figures.audit,
        })
    }

    fn rates(&self, bytes: impl Fn(Moved) -> u64) -> Value {
        let figures = self.figures();
        json!({
            "read_gib_per_second": self.gib_per_second(bytes(figures.read_total())),
            "written_gib_per_second": self.gib_per_second(bytes(figures.written)),
            "storage_read_gib_per_second":
                self.gib_per_second(bytes(figures.read[KvTier::Storage.index()])),
            "storage_written_gib_per_second":
                self.gib_per_second(bytes(self.written_by_tier()[KvTier::Storage.index()])),
        })
    }

    /// What operators should know, such as a file system without direct I/O.
    pub fn notes(&self) -> Vec<String> {
        let Detail::Store { stats, .. } = &self.detail else { return Vec::new() };
        let stages = stats.stages.iter().flat_map(|(_, stage)| stage.notes.clone());
        stats.notes.iter().cloned().chain(stages).collect()
    }

    fn workload_facts(&self) -> Value {
        let (workload, options) = (&self.workload, &self.options);
        let model = &workload.model;
        let (has_blocks, prompt_tokens) = match self.detail {
            Detail::Store { .. } => (true, PROMPT_TOKENS),
            Detail::Objects(_) => (false, COUNTED_PROMPT_TOKENS),
        };
        json!({
            "model": model.name,
            "bytes_per_token": model.model_bytes_per_token,
            "bytes_per_token_of_rank": model.bytes_per_token,
            "block_tokens": has_blocks.then_some(model.block_tokens),
            "block_bytes": has_blocks.then_some(model.block_bytes),
            "batch_blocks_max": has_blocks.then_some(options.batch_blocks),
            "users": workload.users,
            "workers": options.workers,
            "seed": workload.seed,
            "requests_max": workload.requests_max,
            "request_rate": options.request_rate,
            "generation_mode": self.generation_mode,
            "seconds_per_token": options.token_time.as_secs_f64(),
            "prefills_at_once_max": options.prefills_max,
            "has_multi_turn": workload.has_multi_turn,
            "has_shared_prompts": workload.has_shared_prompts,
            "prompt_tokens": prompt_tokens,
            "preconditioned_bytes": options.precondition.map_or(0, |it| it.bytes),
            "blocks_stored_before": self.outcome.blocks_before,
            "phases": workload.phases.name(),
            "documents": workload.documents.count,
            "recorded": workload.recorded.as_ref().map(|it| it.facts()),
            "turns_max": workload.settings.turns_max,
            "context_tokens_max": has_blocks.then_some(CONTEXT_TOKENS_MAX),
            "tokens_per_decode_read": workload.settings.tokens_per_decode_read,
        })
    }

    /// The size of the file tier. `None`: nothing is stored in it, and it has no limit.
    pub fn files_bytes(&self) -> Option<u64> {
        (self.sizes.files_bytes < u64::MAX).then_some(self.sizes.files_bytes)
    }

    fn tier_facts(&self) -> Value {
        let sizes = &self.sizes;
        let staging = if sizes.cpu_bytes == 0 { sizes.staging_bytes } else { 0 };
        let write = if self.objects().is_some() { "first tier with room" } else { "through" };
        json!({
            "gpu": { "bytes": sizes.gpu_bytes, "is_simulated": true },
            "cpu": { "bytes": sizes.cpu_bytes, "staging_bytes": staging },
            "storage": { "bytes": self.files_bytes(), "write": write },
        })
    }

    fn latencies(&self) -> BTreeMap<&'static str, Percentiles> {
        let figures = self.figures();
        let [gpu, cpu, storage] = &figures.read_by_tier;
        let all = [
            ("end_to_end", &figures.end_to_end),
            ("queue", &figures.queue),
            ("storage", &figures.storage),
            ("generation", &figures.generation),
            ("prefill_write", &figures.write),
            ("reload_read", &figures.reload),
            ("decode_read", &figures.decode),
            ("retrieval_read", &figures.retrieval),
            ("context_read_gpu", gpu),
            ("context_read_cpu", cpu),
            ("context_read_storage", storage),
            ("write_call", &figures.write_call),
            ("read_call", &figures.read_call),
        ];
        all.into_iter().map(|(name, histogram)| (name, histogram.percentiles())).collect()
    }
}

/// The names of the parts of [`ObjectFigures::parts`].
const PARTS: [&str; 4] =
    ["storage_read_device", "storage_read_host", "storage_write_device", "storage_write_host"];

fn add_percentiles(all: &mut Map<String, Value>, prefix: &str, histogram: &LatencyHistogram) {
    let has_samples = histogram.count() > 0;
    for (suffix, ms) in named(&histogram.percentiles()) {
        let value = if has_samples { json!(ms) } else { Value::Null };
        all.insert(format!("{prefix}_{suffix}_ms"), value);
    }
}

fn named(percentiles: &Percentiles) -> [(&'static str, f64); 5] {
    [
        ("p50", percentiles.p50),
        ("p95", percentiles.p95),
        ("p99", percentiles.p99),
        ("p999", percentiles.p999),
        ("p9999", percentiles.p9999),
    ]
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
