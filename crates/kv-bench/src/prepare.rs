//! What requests expect to be there, stored before the window.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use cascade_block::BlockKey;
use cascade_replay::payload;

use crate::KvBenchError;
use crate::backend::{Backend, NewBlock, Stored};
use crate::block_names::BlockNames;
use crate::plan::{Phases, UserPlan, Workload};
use crate::progress::Progress;
use crate::retrieval::Documents;

/// The chains that are stored before the window: shared prompts, documents and, with decode alone,
/// a context for each user.
fn chains_before(workload: &Workload) -> Vec<Vec<BlockKey>> {
    let names = BlockNames::new(workload.seed);
    let prompts = if workload.has_shared_prompts { 0..3 } else { 0..0 };
    let prompts = prompts.map(|prompt| {
        (0..workload.prompt_blocks(prompt)).map(|at| names.of_prompt(prompt, at)).collect()
    });
    let chunk_blocks = Documents::chunk_blocks(&workload.model);
    let documents = (0..workload.documents.count).map(|document| {
        let chunks = Documents::chunks(workload.seed, &workload.model, document);
        (0..chunks * chunk_blocks).map(|at| names.of_document(document, at)).collect()
    });
    let users = if workload.phases == Phases::DecodeOnly { 0..workload.users } else { 0..0 };
    let contexts = users.map(|user| {
        let context = UserPlan::new(workload, user).next_request(workload);
        let own = 0..context.total_blocks;
        own.map(|at| names.of_conversation(user, context.conversation, at)).collect()
    });
    prompts.chain(documents).chain(contexts).collect()
}

/// Bytes that are written before the window and removed again, so that a disk has no fresh space
/// left that would make its first writes fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Precondition {
    /// Bytes to write.
    pub bytes: u64,
    /// Threads that write.
    pub threads: usize,
}

/// Writes before the window.
struct Preparation<'a> {
    backend: &'a dyn Backend,
    block_bytes: usize,
    progress: &'a Progress,
    failure: Mutex<Option<String>>,
}

impl<'a> Preparation<'a> {
    fn new(backend: &'a dyn Backend, workload: &Workload, progress: &'a Progress) -> Self {
        let block_bytes = workload.model.block_bytes;
        Self { backend, block_bytes, progress, failure: Mutex::default() }
    }

    /// Stores a block. False if the preparation is over: it failed, or the run was stopped.
    fn store(&self, key: BlockKey, parent: Option<BlockKey>) -> bool {
        if self.progress.is_stopped.load(Ordering::Relaxed) {
            return false;
        }
        let stored = self.backend.reserve(self.block_bytes).and_then(|mut space| {
            payload::fill(&key, space.bytes_mut());
            let outcomes = self.backend.put(vec![NewBlock { key, parent, space }]);
            let failed = outcomes.into_iter().find_map(|outcome| match outcome {
                Stored::No(reason) => Some(reason),
                Stored::Yes | Stored::Present => None,
            });
            failed.map_or(Ok(()), Err)
        });
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(reason) = stored {
            failure.get_or_insert(reason);
        }
        failure.is_none()
    }

    fn finish(self) -> Result<(), KvBenchError> {
        let failure = self.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        failure.map_or(Ok(()), |reason| Err(KvBenchError::Prepare(reason)))
    }
}

/// Calls `work` with 0, 1, 2 and so on from several threads, until it returns false in each.
pub(crate) fn in_parallel(threads: usize, work: &(dyn Fn(usize) -> bool + Sync)) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| while work(next.fetch_add(1, Ordering::Relaxed)) {});
        }
    });
}

/// Stores what the requests expect to be there. Returns how many blocks that is.
pub(crate) fn store_before(
    backend: &dyn Backend,
    workload: &Workload,
    threads: usize,
    progress: &Progress,
) -> Result<u64, KvBenchError> {
    let chains = chains_before(workload);
    let preparation = Preparation::new(backend, workload, progress);
    in_parallel(threads, &|index| {
        let Some(chain) = chains.get(index) else { return false };
        let parents = std::iter::once(None).chain(chain.iter().copied().map(Some));
        chain.iter().zip(parents).all(|(key, parent)| preparation.store(*key, parent))
    });
    preparation.finish()?;
    Ok(chains.iter().map(|chain| chain.len() as u64).sum())
}

/// Writes and removes blocks that no request has.
pub(crate) fn precondition(
    backend: &dyn Backend,
    workload: &Workload,
    Precondition { bytes, threads }: Precondition,
    progress: &Progress,
) -> Result<(), KvBenchError> {
    let names = BlockNames::new(workload.seed);
    let preparation = Preparation::new(backend, workload, progress);
    let count = bytes.div_ceil(workload.model.block_bytes as u64);
    in_parallel(threads, &|index| {
        let index = index as u64;
        index < count && preparation.store(names.of_precondition(index), None)
    });
    preparation.finish()?;
    backend.clear();
    Ok(())
}
