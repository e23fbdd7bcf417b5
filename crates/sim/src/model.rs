//! The naive model of a store: which blocks each key may have, and what a call may return.
//!
//! Time is logical: a tick at the begin and at the end of each call. A call takes effect at some
//! moment between its two ticks, so calls that overlap may take effect in either order. The model
//! does not search for an order. It keeps, for each put, from when to when its block may be there.

use std::collections::BTreeMap;

use cascade_runtime::unix_ms;

use crate::content::Content;
use crate::finding::Findings;
use crate::profile::{Profile, Promises};

/// A moment in the order of begins and ends of calls.
pub(crate) type Tick = u64;

/// The blocks of all keys, as far as calls and their results tell.
#[derive(Debug)]
pub(crate) struct Model {
    now: Tick,
    profile: Profile,
    pub(crate) promises: Promises,
    keys: Vec<Vec<Version>>,
    /// The latest content number of each key.
    numbers: Vec<u32>,
    /// The begins of the calls in flight, and the wall clock at them.
    open: BTreeMap<Tick, u64>,
    /// The removals in flight.
    removals: Vec<Removal>,
    erases_in_flight: u32,
    last_erase_ended: Tick,
    pub(crate) findings: Findings,
}

/// A block that may be under a key: the trace of one put.
#[derive(Debug, Clone, Copy)]
struct Version {
    content: Content,
    /// It stands for every content of its key up to this one: the files may have any of them.
    stands_for_all: bool,
    /// The begin of the put.
    begin: Tick,
    /// The end of the put; none while it is in flight.
    end: Option<Tick>,
    /// The store said that it has the block.
    is_acknowledged: bool,
    /// It shares the bytes of another key. Until files know this key, it can be absent for a read.
    is_linked: bool,
    /// From here on it may be absent.
    doomed: Option<Tick>,
    /// From here on it is certainly absent.
    dead: Option<Tick>,
    expiry: Expiry,
    /// It was flushed, and its absence if it is dead.
    persisted: Persisted,
}

/// Whether a version expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expiry {
    Never,
    /// From this wall clock on a call does not return it.
    At(u64),
    /// It expires, and the clock can be set back: files that were opened after its end do not know
    /// it, and have it again once they are opened before its end.
    MayComeBack,
}

/// What a crash leaves of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Persisted {
    /// Nothing is certain.
    Nothing,
    /// A flush that began after the put has written it.
    Block,
    /// A flush that began after the removal has recorded it.
    Removal,
}

#[derive(Debug, Clone)]
struct Removal {
    begin: Tick,
    scope: Scope,
}

/// What a removal removes.
#[derive(Debug, Clone)]
pub(crate) enum Scope {
    /// These keys.
    Keys(Vec<u32>),
    /// All keys.
    All,
}

/// The result of a put, as far as the model needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PutResult {
    Stored,
    /// Stored, by the bytes of another key.
    Linked,
    Present,
    /// Present with the same length; the bytes were not compared.
    SameLength,
    Conflict,
    /// Present with another length.
    OtherLength,
    Declined,
    /// Declined for what the caller said of it, not for want of room.
    Refused,
    Failed,
}

impl Scope {
    fn covers(&self, key: u32) -> bool {
        match self {
            Self::Keys(keys) => keys.contains(&key),
            Self::All => true,
        }
    }
}

impl Version {
    /// Whether a call that began at `begin` and has not ended may have seen it.
    fn may_be_seen(&self, begin: Tick) -> bool {
        self.dead.is_none_or(|dead| dead >= begin)
    }

    /// Whether its put ended before a call that began at `begin`.
    fn is_before(&self, begin: Tick) -> bool {
        self.end.is_some_and(|end| end < begin)
    }

    fn doom(&mut self, now: Tick) {
        self.doomed = Some(self.doomed.map_or(now, |doomed| doomed.min(now)));
    }

    fn end_at(&mut self, now: Tick) {
        self.doom(now);
        if self.dead.is_none() {
            self.dead = Some(now);
            self.persisted = Persisted::Nothing;
        }
    }
}

impl Model {
    pub(crate) fn new(profile: &Profile) -> Self {
        let key_count = profile.key_count as usize;
        Self {
            now: 0,
            profile: profile.clone(),
            promises: profile.promises(),
            keys: vec![Vec::new(); key_count],
            numbers: vec![0; key_count],
            open: BTreeMap::new(),
            removals: Vec::new(),
            erases_in_flight: 0,
            last_erase_ended: 0,
            findings: Findings::default(),
        }
    }

    /// The content number to put under a key: the latest, or with `is_new` one that was never put.
    pub(crate) fn number(&mut self, key: u32, is_new: bool) -> u32 {
        let number = &mut self.numbers[key as usize];
        *number += u32::from(is_new);
        *number
    }

    fn tick(&mut self) -> Tick {
        self.now += 1;
        self.now
    }

    /// A call begins. Every begun call is ended by [`Model::end`].
    pub(crate) fn begin(&mut self) -> Tick {
        let begin = self.tick();
        self.open.insert(begin, unix_ms());
        begin
    }

    /// The call that began at `begin` has returned, and all its results were checked.
    pub(crate) fn end(&mut self, begin: Tick) {
        self.tick();
        self.open.remove(&begin);
    }

    /// A put of these blocks begins.
    pub(crate) fn begin_put(&mut self, blocks: &[(u32, Content)]) -> Tick {
        let begin = self.begin();
        let (&oldest, _) = self.open.first_key_value().expect("this call is open");
        for (key, content) in blocks {
            let is_removed = self.removals.iter().any(|removal| removal.scope.covers(*key));
            let versions = &mut self.keys[*key as usize];
            let has_files = self.promises.has_files;
            let is_over = |version: &Version| {
                let is_settled = !has_files || version.persisted == Persisted::Removal;
                is_settled && version.dead.is_some_and(|dead| dead < oldest)
            };
            versions.retain(|version| !is_over(version));
            versions.push(Version {
                content: *content,
                stands_for_all: false,
                begin,
                end: None,
                is_acknowledged: false,
                is_linked: false,
                doomed: is_removed.then_some(begin),
                dead: None,
                expiry: Expiry::Never,
                persisted: Persisted::Nothing,
            });
        }
        begin
    }

    /// The blocks of a put in flight expire so long after this moment, at the latest.
    pub(crate) fn expire(&mut self, begin: Tick, ttl_ms: u64) {
        let expires_ms = unix_ms().saturating_add(ttl_ms);
        let versions = self.keys.iter_mut().flatten();
        for version in versions.filter(|version| version.begin == begin && version.end.is_none()) {
            version.doom(begin);
            version.expiry =
                if self.profile.sets_clock { Expiry::MayComeBack } else { Expiry::At(expires_ms) };
        }
    }

    /// The put has returned. One result for each block.
    pub(crate) fn end_put(
        &mut self,
        begin: Tick,
        blocks: &[(u32, Content)],
        results: &[PutResult],
    ) {
        let now = self.tick();
        // Stored blocks first: others of the same batch can be equal to them.
        for ((key, content), result) in blocks.iter().zip(results) {
            if matches!(result, PutResult::Stored | PutResult::Linked) {
                let is_linked = *result == PutResult::Linked;
                self.stored((begin, now), *key, *content, is_linked);
            }
        }
        for ((key, content), result) in blocks.iter().zip(results) {
            match result {
                PutResult::Stored | PutResult::Linked => {}
                PutResult::Failed => {
                    if let Some(own) = self.unended(begin, *key, *content) {
                        own.end = Some(now);
                        own.doom(begin);
                    }
                }
                PutResult::Present
                | PutResult::SameLength
                | PutResult::Conflict
                | PutResult::OtherLength => {
                    self.drop_unended(begin, *key, *content);
                    self.check_comparison(begin, *key, *content, *result);
                }
                PutResult::Refused => self.drop_unended(begin, *key, *content),
                PutResult::Declined => {
                    self.drop_unended(begin, *key, *content);
                    if self.promises.keeps_all {
                        let what = format!("key {key}: declined in a world with room for all");
                        self.findings.add(what);
                    }
                }
            }
        }
        self.open.remove(&begin);
    }

    /// Whether a block that a put in flight brings may have been removed already.
    pub(crate) fn is_doomed(&self, begin: Tick, key: u32) -> bool {
        let mut versions = self.keys[key as usize].iter();
        versions.any(|version| version.begin == begin && version.doomed.is_some())
    }

    fn unended(&mut self, begin: Tick, key: u32, content: Content) -> Option<&mut Version> {
        let versions = self.keys[key as usize].iter_mut();
        let mut own = versions.filter(|version| version.begin == begin && version.end.is_none());
        own.find(|version| version.content == content)
    }

    fn drop_unended(&mut self, begin: Tick, key: u32, content: Content) {
        let versions = &mut self.keys[key as usize];
        let own = |version: &Version| {
            version.begin == begin && version.end.is_none() && version.content == content
        };
        if let Some(at) = versions.iter().position(own) {
            versions.remove(at);
        }
    }

    /// The key was absent at one moment of the call, and has had this content since.
    fn stored(&mut self, (begin, now): (Tick, Tick), key: u32, content: Content, is_linked: bool) {
        let kept: Vec<Content> = self.certain(key, begin).collect();
        for old in kept {
            let what = format!("key {key}: stored {content}, although it must have had {old}");
            self.findings.add(what);
        }
        for version in &mut self.keys[key as usize] {
            if version.is_before(begin) {
                version.end_at(now);
            }
        }
        // Files may be writing these bytes under this key, with the time of a put that has expired.
        let was_other = self.keys[key as usize].iter().any(|version| {
            version.begin < begin
                && version.expiry != Expiry::Never
                && version.content.has_same_bytes(content)
        });
        let is_doomed = is_linked && was_other && self.promises.has_files;
        if let Some(own) = self.unended(begin, key, content) {
            own.end = Some(now);
            own.is_acknowledged = true;
            own.is_linked = is_linked;
            if is_doomed {
                own.doom(now);
            }
        }
    }

    fn check_comparison(&mut self, begin: Tick, key: u32, content: Content, result: PutResult) {
        let fits = |version: &Version| {
            let other = version.content;
            version.stands_for_all
                || match result {
                    PutResult::Present => other.has_same_bytes(content),
                    PutResult::SameLength => other.length == content.length,
                    PutResult::OtherLength => other.length != content.length,
                    _ => !other.has_same_bytes(content),
                }
        };
        if !self.possible(key, begin).any(fits) {
            let known = self.describe(key, begin);
            let what = format!("key {key}: put of {content} returned {result:?}, but {known}");
            self.findings.add(what);
        }
    }

    /// A removal begins: a deletion, a clear, or an erase.
    pub(crate) fn begin_removal(&mut self, scope: Scope, is_erase: bool) -> Tick {
        let begin = self.begin();
        self.erases_in_flight += u32::from(is_erase);
        self.in_scope(&scope, |version| version.doom(begin));
        self.removals.push(Removal { begin, scope });
        begin
    }

    /// The removal has failed: it may have removed anything.
    pub(crate) fn give_up_removal(&mut self, begin: Tick, is_erase: bool) {
        self.erases_in_flight -= u32::from(is_erase);
        self.removals.retain(|removal| removal.begin != begin);
        self.end(begin);
    }

    /// The removal has returned, and has removed all that was there when it began.
    pub(crate) fn end_removal(&mut self, begin: Tick, is_erase: bool) {
        let now = self.tick();
        self.erases_in_flight -= u32::from(is_erase);
        if is_erase {
            self.last_erase_ended = now;
        }
        self.open.remove(&begin);
        let at = self.removals.iter().position(|removal| removal.begin == begin);
        let removal = self.removals.swap_remove(at.expect("a removal ends once"));
        self.in_scope(&removal.scope, |version| {
            if version.is_before(begin) {
                version.end_at(now);
            }
        });
    }

    /// A deletion said that this key had a block.
    pub(crate) fn deleted(&mut self, begin: Tick, key: u32) {
        // It can be one that has expired and that no other call has found yet.
        let mut versions = self.keys[key as usize].iter();
        if !versions.any(|version| version.may_be_seen(begin)) {
            self.findings.add(format!("key {key}: deleted a block that no caller put"));
        }
    }

    fn in_scope(&mut self, scope: &Scope, change: impl Fn(&mut Version)) {
        match scope {
            Scope::Keys(keys) => {
                for key in keys {
                    self.keys[*key as usize].iter_mut().for_each(&change);
                }
            }
            Scope::All => self.keys.iter_mut().flatten().for_each(change),
        }
    }

    /// Whether an erase overlaps a call that began at `begin`.
    pub(crate) fn is_erasing(&self, begin: Tick) -> bool {
        self.erases_in_flight > 0 || self.last_erase_ended > begin
    }

    /// A read returned these bytes. Returns what they are.
    pub(crate) fn hit(&mut self, begin: Tick, key: u32, bytes: &[u8]) -> Option<Content> {
        let found = self.possible(key, begin).find_map(|version| {
            if version.stands_for_all {
                return self.any_content(key, version.content.number, bytes);
            }
            version.content.first_difference(bytes).is_none().then_some(version.content)
        });
        if found.is_none() {
            let what = describe_bytes(bytes);
            let known = self.describe(key, begin);
            self.findings.add_wrong_bytes(format!("key {key}: read {what}, but {known}"));
        }
        found
    }

    /// A read, a lookup or a question found nothing. Returns whether that is a violation.
    pub(crate) fn miss(&mut self, begin: Tick, key: u32, how: &str) -> bool {
        let Some(lost) = self.certain(key, begin).next() else { return false };
        self.findings.add(format!("key {key}: {how} found nothing, but it must have {lost}"));
        true
    }

    /// A lookup or a question found a block.
    pub(crate) fn found(&mut self, begin: Tick, key: u32, how: &str) {
        if self.possible(key, begin).next().is_none() {
            self.findings.add(format!("key {key}: {how} found a block that no caller put"));
        }
    }

    /// A flush that began at `begin` has succeeded.
    pub(crate) fn flushed(&mut self, begin: Tick) {
        // An erase cancels removals that are queued.
        if self.is_erasing(begin) {
            return;
        }
        for version in self.keys.iter_mut().flatten() {
            version.persisted = match version.dead {
                Some(dead) if dead < begin && version.expiry != Expiry::MayComeBack => {
                    Persisted::Removal
                }
                None if version.is_before(begin) && version.is_acknowledged => Persisted::Block,
                _ => version.persisted,
            };
        }
    }

    /// The store was closed, and `is_flushed` if its last flush succeeded: no call is in flight.
    pub(crate) fn closed(&mut self, is_flushed: bool) {
        let now = self.begin();
        if is_flushed {
            self.flushed(now);
        }
        self.end(now);
        self.reopened(self.profile.keeps_pool);
    }

    /// The process was killed, perhaps because of a power loss. Calls in flight may have had an
    /// effect.
    pub(crate) fn crashed(&mut self, has_lost_power: bool) {
        let now = self.tick();
        self.open.clear();
        self.removals.clear();
        self.erases_in_flight = 0;
        for version in self.keys.iter_mut().flatten() {
            if version.end.is_none() {
                version.end = Some(now);
                version.doom(now);
            }
        }
        let Promises { has_files, survives_power_loss, .. } = self.promises;
        if has_lost_power && has_files && !survives_power_loss {
            self.forget();
        } else {
            self.reopened(self.profile.keeps_pool && !has_lost_power);
        }
    }

    /// What was only in memory is gone, unless it `is_warm`; what files have may come back.
    fn reopened(&mut self, is_warm: bool) {
        let now = self.tick();
        let Promises { has_files, files_keep_all, has_faults, keeps_all, .. } = self.promises;
        if has_faults {
            return self.forget();
        }
        for version in self.keys.iter_mut().flatten() {
            if !has_files {
                // No removal from memory comes to nothing.
                match is_warm {
                    true if keeps_all && version.content.length > 0 => {}
                    true => version.doom(now),
                    false => version.end_at(now),
                }
                continue;
            }
            let is_kept = files_keep_all && version.content.length > 0;
            match version.persisted {
                Persisted::Removal => {}
                Persisted::Block if is_kept => {}
                Persisted::Block => version.doom(now),
                // A removal that was not recorded may come to nothing.
                Persisted::Nothing => {
                    version.dead = None;
                    version.doom(now);
                }
            }
        }
    }

    /// Each key may have any block that it ever had, or none.
    fn forget(&mut self) {
        let now = self.tick();
        for (key, versions) in (0..).zip(&mut self.keys) {
            let content = self.profile.content(key, self.numbers[key as usize]);
            versions.clear();
            versions.push(Version {
                content,
                stands_for_all: true,
                begin: 0,
                end: Some(now),
                is_acknowledged: false,
                is_linked: false,
                doomed: Some(now),
                dead: None,
                expiry: Expiry::Never,
                persisted: Persisted::Nothing,
            });
        }
    }

    /// The content of a key, up to a number, that has these bytes.
    fn any_content(&self, key: u32, number_max: u32, bytes: &[u8]) -> Option<Content> {
        // Short blocks do not name their content.
        let numbers = match Content::named_in(bytes) {
            Some(named) if named.number > number_max => return None,
            Some(named) => named.number..=named.number,
            None => 0..=number_max,
        };
        let mut contents = numbers.map(|number| self.profile.content(key, number));
        contents.find(|content| content.first_difference(bytes).is_none())
    }

    /// What a key may have had at some moment since `begin`.
    fn possible(&self, key: u32, begin: Tick) -> impl Iterator<Item = &Version> {
        let unix_ms = self.open.get(&begin).copied().unwrap_or(0);
        let has_expired =
            move |version: &Version| matches!(version.expiry, Expiry::At(at) if at <= unix_ms);
        let versions = self.keys[key as usize].iter();
        versions.filter(move |version| version.may_be_seen(begin) && !has_expired(version))
    }

    /// Contents that a key must have had at every moment since `begin`.
    fn certain(&self, key: u32, begin: Tick) -> impl Iterator<Item = Content> {
        let Promises { keeps_all, has_files, .. } = self.promises;
        let loses_names = self.profile.loses_names();
        let versions = self.keys[key as usize].iter();
        // A file tier cannot store an empty block.
        let is_recorded =
            |version: &Version| version.persisted == Persisted::Block && version.content.length > 0;
        let certain = versions.filter(move |version| {
            keeps_all
                && version.is_acknowledged
                && version.is_before(begin)
                && version.doomed.is_none()
                && version.dead.is_none()
                && !loses_names
                && (!version.is_linked || !has_files || is_recorded(version))
        });
        certain.map(|version| version.content)
    }

    fn describe(&self, key: u32, begin: Tick) -> String {
        let describe = |version: &Version| {
            if version.stands_for_all {
                return format!("any content up to {}", version.content.number);
            }
            version.content.to_string()
        };
        let known: Vec<String> = self.possible(key, begin).map(describe).collect();
        if known.is_empty() {
            "it cannot have a block".to_owned()
        } else {
            format!("it can only have {}", known.join(", or "))
        }
    }
}

/// Whose bytes these are.
fn describe_bytes(bytes: &[u8]) -> String {
    let length = bytes.len();
    match Content::named_in(bytes) {
        Some(named) => match named.first_difference(bytes) {
            None => named.to_string(),
            Some(at) => format!("{length} bytes that begin as {named}, and differ from byte {at}"),
        },
        None => format!("{length} bytes"),
    }
}

#[cfg(test)]
mod tests;
