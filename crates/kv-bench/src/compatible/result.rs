//! What the result file and the summary say differently of a run on whole entries.

use serde_json::{Value, json};

use crate::backend::KvTier;
use crate::compatible::figures::{LogFacts, ObjectFigures};
use crate::compatible::unmeasured;
use crate::criteria::Assessment;
use crate::result::{Detail, KvResult};

impl KvResult {
    /// The name of the mode: `store` or `compatible`.
    pub fn mode(&self) -> &'static str {
        match self.detail {
            Detail::Store { .. } => "store",
            Detail::Objects(_) => "compatible",
        }
    }

    /// The figures of a run on whole entries.
    pub fn objects(&self) -> Option<&ObjectFigures> {
        match &self.detail {
            Detail::Store { .. } => None,
            Detail::Objects(objects) => Some(objects),
        }
    }

    /// The log, if operations were logged and not done.
    pub fn log(&self) -> Option<&LogFacts> {
        self.objects()?.log.as_ref()
    }

    /// Takes out of the result file what was not measured because nothing was stored.
    pub(crate) fn hide_unmeasured(&self, json: &mut Value) {
        if self.log().is_some() {
            unmeasured::hide(json);
        }
    }

    /// What the mode means for the figures, for people. Empty for Cascade's store.
    pub fn mode_notes(&self) -> Vec<String> {
        let Some(objects) = self.objects() else { return Vec::new() };
        if objects.log.is_some() {
            return vec![
                "mode: compatible, operations logged only. Nothing was stored and nothing was \
                 read, so there are no rates and no latencies"
                    .to_owned(),
            ];
        }
        let figures = self.figures();
        let rate = |bytes| self.gib_per_second(bytes);
        let (read, written) = (figures.read_total(), figures.written);
        let mut notes = vec![
            "mode: compatible. Whole requests are stored as files, moved down and counted as in \
             the original benchmark. This measures the disk, not Cascade's store"
                .to_owned(),
            format!(
                "bytes of requests that ended after the window count, divided by the window: \
                 {:.2} GiB/s read, {:.2} GiB/s written. Within the window: {:.2} GiB/s read, \
                 {:.2} GiB/s written",
                rate(read.bytes),
                rate(written.bytes),
                rate(read.window_bytes),
                rate(written.window_bytes),
            ),
        ];
        if figures.cut_requests > 0 {
            notes.push(format!(
                "{} requests were under way when the tail ended, and count nowhere. As in the \
                 original, each thread is waited for at most 2 s, one after another",
                figures.cut_requests
            ));
        }
        if objects.moved.demoted_bytes > 0 {
            let gib = objects.moved.demoted_bytes as f64 / crate::GIB;
            notes.push(format!(
                "{gib:.2} GiB were moved from memory to files. As in the original, no rate and no \
                 latency has them"
            ));
        }
        if self.options.verifies {
            notes.push(
                "bytes are compared with what was written, outside of the latencies. The original \
                 compares none"
                    .to_owned(),
            );
        }
        notes
    }

    /// The assessment of `storage_health`: in compatible mode as the original states it.
    pub fn stated_assessment(&self) -> Assessment {
        match self.detail {
            Detail::Store { .. } => self.assessment.clone(),
            Detail::Objects(_) => self.assessment.as_in_the_original(),
        }
    }

    /// Blocks or entries that went to CPU memory, and to files.
    pub(crate) fn offloads(&self) -> (u64, u64) {
        match &self.detail {
            Detail::Store { stats, gpu_stats } => {
                let evicted = gpu_stats.as_ref().map_or(0, |it| it.counters.evicted_blocks);
                (evicted, stats.counters.demoted_blocks)
            }
            Detail::Objects(objects) => (objects.moved.to_cpu, objects.moved.to_files),
        }
    }

    /// Tokens whose KV files gave; in compatible mode also those that files took.
    pub(crate) fn storage_tokens(&self) -> f64 {
        let read = self.figures().read[KvTier::Storage.index()].bytes;
        match &self.detail {
            Detail::Store { .. } => read as f64 / self.workload.model.bytes_per_token as f64,
            Detail::Objects(objects) => objects.storage_tokens,
        }
    }

    pub(crate) fn store_counters(&self) -> Value {
        match &self.detail {
            Detail::Store { stats, .. } => json!(stats.counters),
            Detail::Objects(_) => Value::Null,
        }
    }

    /// Keys of the original that have no figure.
    pub(crate) fn not_measured(&self) -> &'static [&'static str] {
        match self.detail {
            Detail::Store { .. } => &["storage_*_device_*", "storage_*_host_*"],
            Detail::Objects(_) => &[],
        }
    }

    pub(crate) fn object_facts(&self) -> Value {
        let Some(objects) = self.objects() else { return Value::Null };
        let moved = &objects.moved;
        let [gpu, cpu, storage] = objects.written.map(|it| it.bytes);
        json!({
            "written_bytes": { "gpu": gpu, "cpu": cpu, "storage": storage },
            "entries_to_cpu": moved.to_cpu,
            "entries_to_files": moved.to_files,
            "demoted_bytes": moved.demoted_bytes,
            "dropped_entries": moved.dropped,
        })
    }

    pub(crate) fn log_facts(&self) -> Value {
        let Some(log) = self.log() else { return Value::Null };
        let [gpu, cpu, storage] = log.rows.tiers;
        json!({
            "file": log.path,
            "rows": log.rows.count(),
            "tiers": { "gpu": gpu, "cpu": cpu, "storage": storage },
        })
    }
}
