//! The puts of a client, in one phase and in two.

use cascade_runtime::yield_now;
use cascade_store::{
    CallOptions, DeclineReason, PrepareOutcome, Put, PutOutcome, PutSlab, StoreError,
};

use super::{Call, Client, LATENESS_MAX, note_all};
use crate::content::{Content, IN_HOST_MEMORY};
use crate::model::PutResult;
use crate::workload::PutBatch;

impl Client {
    fn contents(&self, batch: &PutBatch) -> Vec<(u32, Content)> {
        let mut model = self.shared.model();
        let content = |key: &u32| {
            let number = model.number(*key, batch.is_new);
            (*key, self.shared.profile.content(*key, number))
        };
        batch.keys.iter().map(content).collect()
    }

    fn make_put<'a>(&self, batch: &PutBatch, at: usize, bytes: &'a [u8]) -> Put<'a> {
        let key = batch.keys[at];
        let parent = self.workload.parent(key).filter(|_| batch.has_parents);
        Put {
            parent: parent.map(|parent| self.shared.keys[parent as usize]),
            is_prefix: batch.is_prefix,
            is_partial: batch.is_partial && at + 1 == batch.keys.len(),
            ttl_ms: batch.ttl_ms,
            ..Put::new(self.shared.keys[key as usize], bytes)
        }
    }

    pub(super) fn put(&mut self, batch: &PutBatch) {
        let blocks = self.contents(batch);
        let bytes: Vec<Vec<u8>> = blocks.iter().map(|(_, content)| content.bytes()).collect();
        let puts: Vec<Put<'_>> =
            bytes.iter().enumerate().map(|(at, bytes)| self.make_put(batch, at, bytes)).collect();
        let call = self.begin_put("put", &blocks);
        let outcomes = self.store.put(&puts, CallOptions::default());
        self.expire(call, batch);
        self.end_put(call, &blocks, &outcomes);
    }

    pub(super) fn put_slabs(&mut self, batch: &PutBatch) {
        let blocks = self.contents(batch);
        let lengths: Vec<usize> = blocks.iter().map(|(_, content)| content.len()).collect();
        let puts: Vec<Put<'_>> =
            (0..blocks.len()).map(|at| self.make_put(batch, at, &[])).collect();
        let call = self.begin_put("put_slabs", &blocks);
        let prepared = self.store.prepare_all(&puts, &lengths, CallOptions::default());
        let mut outcomes = Vec::new();
        let mut slabs = Vec::new();
        for ((put, (_, content)), one) in puts.iter().zip(&blocks).zip(prepared) {
            outcomes.push(match one {
                PrepareOutcome::Settled(outcome) => Some(outcome),
                PrepareOutcome::Slab(mut slab) => {
                    content.fill(slab.host_mut().expect(IN_HOST_MEMORY));
                    slabs.push(PutSlab {
                        parent: put.parent,
                        is_prefix: put.is_prefix,
                        is_partial: put.is_partial,
                        ttl_ms: put.ttl_ms,
                        ..PutSlab::new(put.key, slab)
                    });
                    None
                }
                PrepareOutcome::Compare | PrepareOutcome::Deferred => {
                    let what = "prepare_all left a block undecided";
                    self.checked(call).findings.add(what);
                    Some(PutOutcome::Failed(StoreError::Closed))
                }
            });
        }
        yield_now();
        let mut put = self.store.put_slabs(slabs, CallOptions::default()).into_iter();
        let is_settled: Vec<bool> = outcomes.iter().map(Option::is_some).collect();
        let outcomes: Vec<PutOutcome> = outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or_else(|| put.next().expect("one for each slab")))
            .collect();
        self.expire(call, batch);
        self.end_put_settled(call, &blocks, &outcomes, &is_settled);
    }

    fn expire(&self, call: Call, batch: &PutBatch) {
        if let Some(ttl_ms) = batch.ttl_ms {
            self.shared.model().expire(call.begin, ttl_ms);
        }
    }

    fn begin_put(&self, name: &'static str, blocks: &[(u32, Content)]) -> Call {
        Call {
            begin: self.shared.model().begin_put(blocks),
            began: self.shared.running_time(),
            name,
        }
    }

    fn end_put(&self, call: Call, blocks: &[(u32, Content)], outcomes: &[PutOutcome]) {
        self.end_put_settled(call, blocks, outcomes, &vec![false; blocks.len()]);
    }

    /// `is_settled`: the outcome came from the first phase, which compares only lengths.
    fn end_put_settled(
        &self,
        call: Call,
        blocks: &[(u32, Content)],
        outcomes: &[PutOutcome],
        is_settled: &[bool],
    ) {
        let took = self.took(call);
        let mut model = self.checked(call);
        // The two phases have a time-out each.
        if took > self.shared.timeout * 2 + LATENESS_MAX {
            model.findings.add(format!("took {took:?}"));
        }
        let mut results = Vec::with_capacity(blocks.len());
        for (((key, content), outcome), is_settled) in blocks.iter().zip(outcomes).zip(is_settled) {
            results.push(match outcome {
                PutOutcome::Stored => PutResult::Stored,
                PutOutcome::Deduplicated => PutResult::Linked,
                PutOutcome::Present if *is_settled => PutResult::SameLength,
                PutOutcome::Present => PutResult::Present,
                PutOutcome::Conflict if *is_settled => PutResult::OtherLength,
                PutOutcome::Conflict => PutResult::Conflict,
                PutOutcome::Declined(DeclineReason::Partial) => PutResult::Refused,
                PutOutcome::Declined(_) => PutResult::Declined,
                PutOutcome::Failed(error) => {
                    // A file tier cannot store an empty block.
                    let is_empty = content.length == 0 && self.shared.profile.has_files();
                    // Nor one that is removed or reclaimed, or that expires, while the caller waits
                    // for its write.
                    let is_refused = matches!(error, StoreError::Tier { .. })
                        && (is_empty
                            || !self.shared.profile.are_files_roomy
                            || self.shared.profile.has_expiry
                            || model.is_doomed(call.begin, *key));
                    if !is_refused {
                        self.check_error(&mut model, call, *key, error);
                    }
                    PutResult::Failed
                }
            });
        }
        model.end_put(call.begin, blocks, &results);
        drop(model);
        note_all(results.iter().map(|result| *result as u64));
    }
}
