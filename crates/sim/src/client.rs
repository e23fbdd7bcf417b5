//! A caller of the store: makes the operations of its workload and checks each result.

mod changes;
mod puts;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, key_of_id, with_causes};
use cascade_memory::Slab;
use cascade_runtime::simulated::World;
use cascade_runtime::{LeafMutex, now, sleep, yield_now};
use cascade_store::{
    BlockState, CallOptions, GetOutcome, Hints, Loss, Request, Store, StoreError, ViewOutcome,
};

use crate::content::{Content, IN_HOST_MEMORY};
use crate::finding::Context;
use crate::lease::Leases;
use crate::model::{Model, Scope, Tick};
use crate::profile::{Profile, TIMEOUT, Trouble};
use crate::workload::{Operation, Workload};

use changes::Follower;

/// A call may take so much longer than its time-out.
const LATENESS_MAX: Duration = Duration::from_millis(50);
/// Views that a client holds at most.
const HELD_MAX: usize = 4;
/// Bytes of the views that a client holds at most.
const HELD_BYTES_MAX: usize = 256 << 10;
/// Keys that a client pins at most.
const PINNED_MAX: usize = 4;

/// What the clients of a world share. It survives crashes of their process.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) profile: Profile,
    pub(crate) world_seed: u64,
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) timeout: Duration,
    model: LeafMutex<Model>,
    operations: AtomicU64,
    /// Virtual time for which the machine was suspended, in nanoseconds.
    suspended_ns: AtomicU64,
    /// Set once nothing disturbs the process any more, but for kills.
    pub(crate) is_calm: AtomicBool,
    /// The number of the operation at which the clients stop: for ever, or to reopen the store.
    pub(crate) operations_end: AtomicU64,
    /// Blocks that a process found in the memory of the one before it.
    pub(crate) recovered: AtomicU64,
}

impl Shared {
    pub(crate) fn new(profile: Profile, world_seed: u64, model: Model) -> Self {
        let root = BlockKey::from_bytes([7; 32]);
        Self {
            keys: (0..profile.key_count).map(|key| key_of_id(root, &key.to_le_bytes())).collect(),
            timeout: TIMEOUT,
            profile,
            world_seed,
            model: LeafMutex::new(model),
            operations: AtomicU64::new(0),
            suspended_ns: AtomicU64::new(0),
            is_calm: AtomicBool::new(false),
            operations_end: AtomicU64::new(0),
            recovered: AtomicU64::new(0),
        }
    }

    /// The model. Never held over a scheduling point, so that no crash leaves it locked.
    pub(crate) fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Operations that have begun.
    pub(crate) fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// The machine was suspended. Calls in progress may take so much longer.
    pub(crate) fn add_suspension(&self, time: Duration) {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.suspended_ns.fetch_add(time_ns, Ordering::Relaxed);
    }

    /// Virtual time for which the machine ran.
    fn running_time(&self) -> Duration {
        now().saturating_sub(Duration::from_nanos(self.suspended_ns.load(Ordering::Relaxed)))
    }

    fn next_operation(&self) -> Option<u64> {
        let number = self.operations();
        let is_over = number >= self.operations_end.load(Ordering::Relaxed)
            || self.model().findings.is_enough();
        // One thread of a world runs at a time, and nothing between here and the load switches.
        (!is_over).then(|| {
            self.operations.store(number + 1, Ordering::Relaxed);
            number
        })
    }

    pub(crate) fn block_keys(&self, keys: &[u32]) -> Vec<BlockKey> {
        keys.iter().map(|key| self.keys[*key as usize]).collect()
    }
}

/// A caller of the store.
#[derive(Debug)]
pub(crate) struct Client {
    shared: Arc<Shared>,
    store: Store,
    workload: Workload,
    number: usize,
    /// The operation in progress, and when its call began.
    operation: u64,
    held: VecDeque<HeldView>,
    leases: Leases,
    pinned: Vec<u32>,
    follower: Follower,
}

#[derive(Debug)]
struct HeldView {
    key: u32,
    content: Content,
    slab: Slab,
}

/// A call in progress.
#[derive(Debug, Clone, Copy)]
struct Call {
    begin: Tick,
    /// Without the time for which the machine was suspended.
    began: Duration,
    name: &'static str,
}

impl Client {
    pub(crate) fn new(shared: &Arc<Shared>, store: Store, number: usize, stream: u64) -> Self {
        let workload = Workload::new(&shared.profile, shared.world_seed, stream);
        Self {
            shared: Arc::clone(shared),
            workload,
            number,
            operation: 0,
            held: VecDeque::new(),
            leases: Leases::new(&store),
            store,
            pinned: Vec::new(),
            follower: Follower::default(),
        }
    }

    /// Makes operations until the world has had enough of them.
    pub(crate) fn run(mut self) {
        while let Some(number) = self.shared.next_operation() {
            self.operation = number;
            let operation = self.workload.draw();
            self.perform(operation);
            self.pause();
        }
        self.unpin();
        self.release(0);
        self.end_leases(0);
    }

    fn pause(&mut self) {
        match self.workload.random().below(256) {
            0 => sleep(Duration::from_millis(1 + self.workload.random().below(20))),
            1..64 => sleep(Duration::from_micros(1 + self.workload.random().below(50))),
            _ => yield_now(),
        }
    }

    fn perform(&mut self, operation: Operation) {
        match operation {
            Operation::Put(batch) => self.put(&batch),
            Operation::PutSlabs(batch) => self.put_slabs(&batch),
            Operation::Get(keys) => self.get(&keys),
            Operation::View(keys) => self.view(&keys),
            Operation::Lease(keys) => self.lease(&keys),
            Operation::Acquire(keys) => self.acquire(&keys),
            Operation::LookupPrefix(keys) => self.lookup(&keys),
            Operation::Contains(keys) => self.contains(&keys),
            Operation::Locate(keys) => self.locate(&keys),
            Operation::Delete(keys) => self.delete(&keys),
            Operation::Clear => self.clear(),
            Operation::Erase => self.erase(),
            Operation::Pin(keys) => self.pin(&keys),
            Operation::Unpin => self.unpin(),
            Operation::Prefetch(keys) => {
                let accepted = self.unchecked("prefetch", |client| {
                    client.store.prefetch(&client.shared.block_keys(&keys))
                });
                note(accepted as u64);
            }
            Operation::Hint(keys) => self.unchecked("hint", |client| {
                let keys = client.shared.block_keys(&keys);
                let hints = Hints { ends_session: true, ..Hints::default() };
                client.store.hint(&Request { hints, ..Request::new(&keys) });
            }),
            Operation::Flush => self.flush(),
            Operation::Explain(keys) => {
                let call = self.begin("explain");
                self.explain(&keys, call);
                self.end(call);
            }
            Operation::Scrub => self.unchecked("scrub", |client| {
                let report = client.store.scrub(CallOptions::default());
                note(report.blocks);
                if report.damaged > 0 {
                    let text = format!("the scrubber found {} damaged blocks", report.damaged);
                    client.shared.model().findings.add(text);
                }
            }),
            Operation::Stats => self.unchecked("stats", |client| note(client.store.stats().keys)),
            Operation::Changes => self.follow(),
            Operation::Release => {
                self.release(0);
                self.end_leases(0);
            }
        }
    }

    fn begin(&self, name: &'static str) -> Call {
        Call { begin: self.shared.model().begin(), began: self.shared.running_time(), name }
    }

    fn checked(&self, call: Call) -> MutexGuard<'_, Model> {
        let mut model = self.shared.model();
        let context = Context { client: self.number, operation: self.operation, name: call.name };
        model.findings.set_context(Some(context));
        model
    }

    /// The results were checked. Checks the time that the call took.
    fn end(&self, call: Call) {
        let took = self.took(call);
        let mut model = self.checked(call);
        if took > self.shared.timeout + LATENESS_MAX {
            let timeout = self.shared.timeout;
            model.findings.add(format!("took {took:?} with a time-out of {timeout:?}"));
        }
        model.end(call.begin);
    }

    fn took(&self, call: Call) -> Duration {
        self.shared.running_time().saturating_sub(call.began)
    }

    fn unchecked<T>(&self, name: &'static str, make: impl FnOnce(&Self) -> T) -> T {
        let call = self.begin(name);
        let result = make(self);
        self.end(call);
        result
    }

    /// Checks whether a call may fail so.
    fn check_error(&self, model: &mut Model, call: Call, key: u32, error: &StoreError) {
        let is_allowed = match error {
            StoreError::Erasing => model.is_erasing(call.begin),
            StoreError::NoRoom { .. } => !self.shared.profile.is_dram_roomy,
            // Others deleted the key in each attempt.
            StoreError::Timeout { operation: "put a key that other callers delete", .. } => true,
            StoreError::Timeout { .. } | StoreError::Busy { .. } | StoreError::Tier { .. } => {
                model.promises.has_faults
            }
            _ => false,
        };
        if !is_allowed {
            let why = with_causes(error);
            model.findings.add(format!("key {key}: failed with `{why}`"));
        }
    }

    fn get(&mut self, keys: &[u32]) {
        let block_keys = self.shared.block_keys(keys);
        let longest = self.shared.profile.lengths.iter().max().copied().unwrap_or(0) as usize;
        let mut buffers: Vec<Vec<u8>> = keys.iter().map(|_| vec![0xee; longest]).collect();
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        let call = self.begin("get");
        let outcomes = self.store.get(&block_keys, &mut slices, CallOptions::default());
        let mut missed = Vec::new();
        let mut model = self.checked(call);
        for ((key, buffer), outcome) in keys.iter().zip(&buffers).zip(&outcomes) {
            match outcome {
                GetOutcome::Hit { bytes, .. } => {
                    model.hit(call.begin, *key, &buffer[..*bytes]);
                }
                GetOutcome::Miss => {
                    model.miss(call.begin, *key, "a read");
                    missed.push(*key);
                }
                GetOutcome::TooShort { needed_bytes } => {
                    model.findings.add(format!("key {key}: {needed_bytes} bytes are needed"));
                }
                GetOutcome::Failed(error) => self.check_error(&mut model, call, *key, error),
            }
        }
        drop(model);
        note_all(outcomes.iter().map(|outcome| match outcome {
            GetOutcome::Hit { bytes, .. } => 16 + *bytes as u64,
            GetOutcome::Miss => 1,
            GetOutcome::TooShort { .. } => 2,
            GetOutcome::Failed(_) => 3,
        }));
        self.explain(&missed, call);
        self.end(call);
    }

    fn view(&mut self, keys: &[u32]) {
        let call = self.begin("view");
        let views = self.store.view(&self.shared.block_keys(keys), CallOptions::default());
        self.check_views(keys, views, call);
        self.end(call);
    }

    /// Leases blocks, as a node does for a process that maps its memory.
    fn lease(&mut self, keys: &[u32]) {
        let call = self.begin("lease");
        let views = self.store.view(&self.shared.block_keys(keys), CallOptions::default());
        let is_given_up = self.workload.random().one_in(16);
        let leased = self.leases.grant(views.len(), is_given_up, |at| match &views[at] {
            ViewOutcome::Hit { slab, .. } => Some(slab.clone()),
            ViewOutcome::Miss | ViewOutcome::Failed(_) => None,
        });
        // From here on, only the holds keep the slabs.
        let codes: Vec<u64> = views.iter().map(|view| u64::from(is_hit(view))).collect();
        drop(views);
        yield_now();
        for (at, lease) in leased {
            let slab = lease.bytes();
            let bytes = slab.host().expect(IN_HOST_MEMORY);
            let content = self.checked(call).hit(call.begin, keys[at], bytes);
            match content {
                Some(content) => self.leases.keep(lease, keys[at], content),
                None => self.leases.end(&lease),
            }
        }
        note_all(codes.into_iter());
        self.end(call);
        self.end_leases(HELD_MAX);
    }

    /// Ends the oldest leases, up to some. Their bytes must be as they were.
    fn end_leases(&mut self, most: usize) {
        while let Some((key, content, lease)) = self.leases.oldest(most, HELD_BYTES_MAX) {
            let slab = lease.bytes();
            let bytes = slab.host().expect(IN_HOST_MEMORY);
            self.check_unchanged("a lease", key, content, bytes);
            self.leases.end(&lease);
            yield_now();
        }
    }

    fn acquire(&mut self, keys: &[u32]) {
        let call = self.begin("acquire");
        let block_keys = self.shared.block_keys(keys);
        let views = self.store.acquire(&Request::new(&block_keys), CallOptions::default());
        if let Some(key) = keys.get(views.len()) {
            self.checked(call).miss(call.begin, *key, "a lookup");
        }
        self.check_views(keys, views, call);
        self.end(call);
    }

    fn check_views(&mut self, keys: &[u32], views: Vec<ViewOutcome>, call: Call) {
        let (mut missed, mut held) = (Vec::new(), Vec::new());
        let mut model = self.checked(call);
        let mut codes = Vec::with_capacity(views.len());
        for (key, view) in keys.iter().zip(views) {
            match view {
                ViewOutcome::Hit { slab, .. } => {
                    codes.push(16 + slab.len() as u64);
                    if let Some(content) =
                        model.hit(call.begin, *key, slab.host().expect(IN_HOST_MEMORY))
                    {
                        held.push(HeldView { key: *key, content, slab });
                    }
                }
                ViewOutcome::Miss => {
                    codes.push(1);
                    model.miss(call.begin, *key, "a read");
                    missed.push(*key);
                }
                ViewOutcome::Failed(error) => {
                    codes.push(3);
                    self.check_error(&mut model, call, *key, &error);
                }
            }
        }
        drop(model);
        note_all(codes.into_iter());
        self.explain(&missed, call);
        self.held.extend(held);
        let is_holding = self.workload.random().one_in(2);
        self.release(if is_holding { HELD_MAX } else { 0 });
    }

    /// Checks why blocks are absent.
    fn explain(&self, keys: &[u32], call: Call) {
        if keys.is_empty() {
            return;
        }
        let block_keys = self.shared.block_keys(keys);
        let explained = self.store.explain(&block_keys, None, CallOptions::default());
        let mut model = self.checked(call);
        let explanation = match explained {
            Ok(explanation) => explanation,
            Err(error) => return self.check_error(&mut model, call, keys[0], &error),
        };
        // A write that a crash cut is found when it is read.
        let profile = &self.shared.profile;
        let has_crashes = profile.trouble >= Trouble::Kills;
        // So is a record under a name of an earlier run.
        let loses_names = profile.loses_names();
        for (key, block) in keys.iter().zip(&explanation.blocks) {
            match &block.state {
                BlockState::Absent { why: why @ (Loss::Damaged | Loss::Vanished), .. }
                    if !(has_crashes || loses_names && *why == Loss::Vanished) =>
                {
                    model.findings.add(format!("key {key}: its block is absent: {why}"));
                }
                BlockState::Present(_) => model.found(call.begin, *key, "an explanation"),
                BlockState::Absent { .. } | BlockState::Unknown => {}
            }
        }
        drop(model);
        note(explanation.leading as u64);
    }

    /// Drops the oldest views that this client holds, up to some. Their bytes must be as they were.
    fn release(&mut self, most: usize) {
        let mut bytes: usize = self.held.iter().map(|held| held.slab.len()).sum();
        while self.held.len() > most || bytes > HELD_BYTES_MAX {
            let Some(HeldView { key, content, slab }) = self.held.pop_front() else { return };
            bytes -= slab.len();
            let bytes = slab.host().expect(IN_HOST_MEMORY);
            self.check_unchanged("a view", key, content, bytes);
            yield_now();
        }
    }

    fn check_unchanged(&self, what: &str, key: u32, content: Content, bytes: &[u8]) {
        let Some(at) = content.first_difference(bytes) else { return };
        let named = Content::named_in(bytes);
        let now = named.map_or_else(String::new, |now| format!("; they begin as {now} now"));
        let (client, operation) = (self.number, self.operation);
        let mut model = self.shared.model();
        model.findings.set_context(Some(Context { client, operation, name: "release" }));
        let text = format!("key {key}: the bytes of {what} of {content} changed at {at}{now}");
        model.findings.add_wrong_bytes(text);
    }

    fn lookup(&mut self, keys: &[u32]) {
        let call = self.begin("lookup_prefix");
        let block_keys = self.shared.block_keys(keys);
        let matched = self.store.lookup_prefix(&Request::new(&block_keys)).tiers.len();
        let mut model = self.checked(call);
        for key in &keys[..matched] {
            model.found(call.begin, *key, "a lookup");
        }
        if let Some(key) = keys.get(matched) {
            model.miss(call.begin, *key, "a lookup");
        }
        drop(model);
        note(matched as u64);
        self.end(call);
    }

    fn contains(&mut self, keys: &[u32]) {
        let call = self.begin("contains");
        let present = self.store.contains(&self.shared.block_keys(keys));
        self.check_present(keys, &present, call);
    }

    fn locate(&mut self, keys: &[u32]) {
        let call = self.begin("locate");
        let tiers = self.store.locate(&self.shared.block_keys(keys));
        let present: Vec<bool> = tiers.iter().map(|tiers| !tiers.is_empty()).collect();
        self.check_present(keys, &present, call);
    }

    fn check_present(&self, keys: &[u32], present: &[bool], call: Call) {
        let mut model = self.checked(call);
        for (key, is_present) in keys.iter().zip(present) {
            if *is_present {
                model.found(call.begin, *key, call.name);
            } else {
                model.miss(call.begin, *key, call.name);
            }
        }
        drop(model);
        note_all(present.iter().map(|is_present| u64::from(*is_present)));
        self.end(call);
    }

    fn begin_removal(&self, name: &'static str, scope: Scope, is_erase: bool) -> Call {
        let begin = self.shared.model().begin_removal(scope, is_erase);
        Call { begin, began: self.shared.running_time(), name }
    }

    fn delete(&mut self, keys: &[u32]) {
        let call = self.begin_removal("delete", Scope::Keys(keys.to_vec()), false);
        let deleted = self.store.delete(&self.shared.block_keys(keys));
        let mut model = self.checked(call);
        for (key, is_deleted) in keys.iter().zip(&deleted) {
            if *is_deleted {
                model.deleted(call.begin, *key);
            }
            // The next put has other bytes, so that a read that returns the old ones is seen.
            model.number(*key, true);
        }
        model.end_removal(call.begin, false);
        drop(model);
        note_all(deleted.iter().map(|is_deleted| u64::from(*is_deleted)));
    }

    fn clear(&mut self) {
        let call = self.begin_removal("clear", Scope::All, false);
        self.store.clear();
        self.checked(call).end_removal(call.begin, false);
    }

    fn erase(&mut self) {
        self.release(0);
        let call = self.begin_removal("erase", Scope::All, true);
        let erased = self.store.erase(CallOptions::default());
        let mut model = self.checked(call);
        match &erased {
            Ok(_) => model.end_removal(call.begin, true),
            Err(error) => {
                self.check_error(&mut model, call, 0, error);
                model.give_up_removal(call.begin, true);
            }
        }
        drop(model);
        note(u64::from(erased.is_ok()));
    }

    fn pin(&mut self, keys: &[u32]) {
        if self.pinned.len() + keys.len() > PINNED_MAX {
            return self.unpin();
        }
        let pinned =
            self.unchecked("pin", |client| client.store.pin(&client.shared.block_keys(keys)));
        self.pinned.extend(keys.iter().zip(&pinned).filter(|(_, is)| **is).map(|(key, _)| *key));
        note_all(pinned.iter().map(|is_pinned| u64::from(*is_pinned)));
    }

    fn unpin(&mut self) {
        let keys = std::mem::take(&mut self.pinned);
        if !keys.is_empty() {
            self.unchecked("unpin", |client| client.store.unpin(&client.shared.block_keys(&keys)));
        }
    }

    fn flush(&mut self) {
        let call = self.begin("flush");
        let flushed = self.store.flush(CallOptions::default());
        let mut model = self.checked(call);
        match &flushed {
            Ok(()) => model.flushed(call.begin),
            Err(error) => self.check_error(&mut model, call, 0, error),
        }
        drop(model);
        note(u64::from(flushed.is_ok()));
        self.end(call);
    }
}

fn is_hit(view: &ViewOutcome) -> bool {
    matches!(view, ViewOutcome::Hit { .. })
}

/// Makes a result part of the event hash.
fn note(event: u64) {
    if let Some(world) = World::current() {
        world.note(event);
    }
}

fn note_all(events: impl Iterator<Item = u64>) {
    events.for_each(note);
}
