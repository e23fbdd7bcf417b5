//! What came and went in a store, in order: whoever follows it knows the exact set of its blocks.
//!
//! A bounded log under the state's lock, which begins when somebody asks for the first time and
//! ends when nobody has asked for as long as it lasts; the catalog writes it, where keys come and
//! go. A follower that begins is told, in pieces, of the keys that are here: the catalog's entries
//! by index, and between two pieces the changes since the last one. The result is exact, because
//! keys do not move. One that is here at the end and did not change since the beginning was at its
//! index when the walk came by; for one that changed, its last change was told after every piece
//! that is older, and every later piece agrees with it.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{BuildHasher, RandomState};

use cascade_block::BlockKey;

use crate::catalog::{ContentIndex, KeyIndex};
use crate::history::Loss;
use crate::state::State;
use crate::{Store, StoreError};

/// Most changes that are told, and entries that are looked at, while the state is held.
const PIECE: u32 = 2048;
/// Stands for "none" where a cursor is bytes.
const NO_WALK: u32 = u32::MAX;

/// One change of what a store has, in any tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Change {
    /// This block is here.
    Stored(BlockKey),
    /// This block is not here any more. It may be told of one that was not told to be here.
    Gone(BlockKey),
    /// No block is here any more.
    Cleared,
}

/// How far somebody follows a store's changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChangeCursor {
    /// Names the log that it is of; it differs after every start.
    epoch: u64,
    /// Changes before the next one.
    sequence: u64,
    /// The index from which on entries are still to be told.
    walk: Option<u32>,
}

impl ChangeCursor {
    /// Length of a cursor as bytes.
    pub const BYTES: usize = 20;

    /// The cursor as bytes, to keep it or to send it.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..].copy_from_slice(&self.walk.unwrap_or(NO_WALK).to_le_bytes());
        bytes
    }

    /// The cursor that these bytes stand for. Any bytes are a cursor; one that no store gave is
    /// one whose changes are lost.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let word = |first: usize| u64::from_le_bytes(std::array::from_fn(|at| bytes[first + at]));
        let walk = u32::from_le_bytes(std::array::from_fn(|at| bytes[16 + at]));
        Self { epoch: word(0), sequence: word(8), walk: (walk != NO_WALK).then_some(walk) }
    }
}

/// What a store tells a follower at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// What to ask with the next time.
    pub next: ChangeCursor,
    /// Whether the changes since the cursor are not known any more, or the store is another run's.
    /// Then the set begins anew: empty yours before you apply `changes`.
    pub is_lost: bool,
    /// Whether the set is exact now: with these changes it is what the store had at one moment of
    /// this call. Otherwise ask again at once.
    pub is_current: bool,
    /// In the order in which they happened.
    pub changes: Vec<Change>,
}

/// The latest changes, and what will end by itself.
#[derive(Debug)]
pub(crate) struct ChangeLog {
    epoch: u64,
    entries: VecDeque<Change>,
    /// Most entries that are kept.
    entries_max: usize,
    /// Changes before the first entry.
    first: u64,
    /// Changes when somebody asked last: no cursor is newer.
    asked: u64,
    /// When keys expire, in milliseconds since 1970, and where their entries are. Blocks expire
    /// when somebody comes across them; a follower is told in time.
    ends: BTreeSet<(u64, u32)>,
}

impl ChangeLog {
    fn new(entries_max: usize) -> Self {
        Self {
            epoch: RandomState::new().hash_one(entries_max),
            // Memory is touched as it fills, and growing never copies.
            entries: VecDeque::with_capacity(entries_max),
            entries_max,
            first: 0,
            asked: 0,
            ends: BTreeSet::new(),
        }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.entries.len() * size_of::<Change>() + self.ends.len() * size_of::<(u64, u32)>()
    }

    fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Notes a change. False: nobody has asked for so long that every cursor would be lost, and
    /// the log is of no use any more.
    pub(crate) fn push(&mut self, change: Change) -> bool {
        if self.entries.len() == self.entries_max {
            if self.end() - self.asked >= self.entries_max as u64 {
                return false;
            }
            self.entries.pop_front();
            self.first += 1;
        }
        self.entries.push_back(change);
        true
    }

    /// A key has come that expires then; zero is never.
    pub(crate) fn expect_end(&mut self, expires_unix_ms: u64, index: u32) {
        if expires_unix_ms != 0 {
            self.ends.insert((expires_unix_ms, index));
        }
    }

    /// That key has gone.
    pub(crate) fn forget_end(&mut self, expires_unix_ms: u64, index: u32) {
        if expires_unix_ms != 0 {
            self.ends.remove(&(expires_unix_ms, index));
        }
    }

    /// A key whose time is over.
    fn ended(&self, now_unix_ms: u64) -> Option<u32> {
        self.ends.first().filter(|(expires, _)| *expires <= now_unix_ms).map(|(_, index)| *index)
    }

    /// No cursor that was given so far is any good.
    fn lose(&mut self) {
        self.first = self.end() + 1;
        self.entries.clear();
    }

    fn knows(&self, cursor: &ChangeCursor) -> bool {
        let kept = self.first..=self.end();
        cursor.epoch == self.epoch && kept.contains(&cursor.sequence)
    }

    /// Where a follower begins: all that is here is still to be told.
    fn beginning(&self) -> ChangeCursor {
        ChangeCursor { epoch: self.epoch, sequence: self.end(), walk: Some(0) }
    }

    /// Tells changes since the cursor until there are `most`.
    fn tell(&self, cursor: &mut ChangeCursor, told: &mut Vec<Change>, most: usize) {
        let room = most.saturating_sub(told.len());
        let from = usize::try_from(cursor.sequence - self.first).expect("it is in the log");
        let to = self.entries.len().min(from.saturating_add(room));
        told.extend(self.entries.range(from..to));
        cursor.sequence = self.first + to as u64;
    }
}

impl Store {
    /// What came and went since a cursor: at most `max` changes, but at least one is always asked
    /// for. Without a cursor, what is here now, from where on one can follow. A set of keys to
    /// which a follower applies each answer (first emptied, if it `is_lost`) is exactly that of the
    /// blocks for which [`Store::contains`] is true, whenever the answer `is_current`.
    ///
    /// The first call makes the store keep changes, `changes_max` of them; it ends when as many
    /// have come to pass since the last call. The state is held for 2,048 changes at a time.
    ///
    /// Fails if the store keeps no changes, or is closed.
    pub fn changes(&self, since: Option<ChangeCursor>, max: usize) -> Result<Changes, StoreError> {
        let node = self.node();
        let entries_max = node.config.changes_max;
        if entries_max == 0 {
            let reason = "0; the store keeps no changes to tell: set how many".to_owned();
            return Err(StoreError::Config { setting: "changes_max", reason });
        }
        let max = max.max(1);
        let mut cursor = since;
        let mut answer: Option<Changes> = None;
        loop {
            let mut state = node.lock();
            if state.is_closed {
                return Err(StoreError::Closed);
            }
            let now_unix_ms = node.clock.unix_ms();
            state.history.tell_time(now_unix_ms);
            let told = answer.as_ref().map_or(0, |answer| answer.changes.len());
            let piece =
                state.tell(cursor, (max - told).min(PIECE as usize), entries_max, now_unix_ms);
            node.release(state);
            cursor = Some(piece.next);
            let whole = match answer.take().filter(|_| !piece.is_lost) {
                None => piece,
                Some(mut before) => {
                    before.changes.extend(piece.changes);
                    Changes { changes: before.changes, is_lost: before.is_lost, ..piece }
                }
            };
            if whole.is_current || whole.changes.len() >= max {
                return Ok(whole);
            }
            answer = Some(whole);
        }
    }
}

impl State {
    /// One piece of an answer.
    fn tell(
        &mut self,
        since: Option<ChangeCursor>,
        most: usize,
        entries_max: usize,
        now_unix_ms: u64,
    ) -> Changes {
        let log = self.catalog.changes_mut();
        let log = log.get_or_insert_with(|| Box::new(ChangeLog::new(entries_max)));
        let known = since.filter(|cursor| log.knows(cursor));
        let mut next = known.unwrap_or_else(|| log.beginning());
        let mut changes = Vec::new();
        log.asked = log.end();
        log.tell(&mut next, &mut changes, most);
        if next.sequence == log.end() && changes.len() < most {
            // So many fit the log before it drops what this follower has yet to be told.
            self.expire(most.min(entries_max) - changes.len().min(entries_max), now_unix_ms);
        }
        let log = self.catalog.changes_mut().as_mut().expect("as much as it keeps does not end it");
        log.tell(&mut next, &mut changes, most);
        let is_told = next.sequence == log.end() && log.ended(now_unix_ms).is_none();
        if is_told && changes.len() < most {
            self.walk(&mut next, &mut changes, most, now_unix_ms);
        }
        if let Some(log) = self.catalog.changes_mut() {
            log.asked = log.end();
        }
        let is_lost = since.is_some() && known.is_none();
        Changes { is_lost, is_current: is_told && next.walk.is_none(), next, changes }
    }

    /// Forgets keys whose time is over, so many at most.
    fn expire(&mut self, most: usize, now_unix_ms: u64) {
        for _ in 0..most {
            let log = self.catalog.changes_mut().as_ref();
            let Some(index) = log.and_then(|log| log.ended(now_unix_ms)) else { return };
            self.forget(KeyIndex(index), Loss::Expired);
        }
    }

    /// Tells some of the keys that are here, from where the cursor is.
    fn walk(
        &mut self,
        cursor: &mut ChangeCursor,
        told: &mut Vec<Change>,
        most: usize,
        now_unix_ms: u64,
    ) {
        let Some(from) = cursor.walk else { return };
        let end = self.catalog.key_indices_end();
        let mut to = from.saturating_add(PIECE).min(end);
        let mut ends = Vec::new();
        for key in self.catalog.keys_at(from..to) {
            if told.len() == most {
                to = key.0;
                break;
            }
            let entry = self.catalog.entry(key);
            if entry.expires_unix_ms != 0 {
                ends.push((entry.expires_unix_ms, key.0));
            }
            let content = self.catalog.content(entry.content);
            if !entry.has_expired(now_unix_ms) && !self.is_out_of_reach(content) {
                told.push(Change::Stored(entry.key));
            }
        }
        if let Some(log) = self.catalog.changes_mut() {
            log.ends.extend(ends);
        }
        cursor.walk = (to < end).then_some(to);
    }

    /// Everything has been forgotten, and nothing of that was told.
    pub(crate) fn note_cleared(&mut self) {
        if let Some(log) = self.catalog.changes_mut() {
            log.ends.clear();
        }
        self.catalog.note(Change::Cleared);
    }

    /// So much came or went that followers had better begin anew.
    pub(crate) fn lose_changes(&mut self) {
        if let Some(log) = self.catalog.changes_mut() {
            log.lose();
        }
    }

    /// Whether anybody could read a content now. As long as every stage is used, every content
    /// that is known.
    pub(crate) fn is_in_reach(&self, content: ContentIndex) -> bool {
        self.shed == 0 || !self.is_out_of_reach(self.catalog.content(content))
    }

    /// A tier gained or lost a content. While a stage is shed, that decides about its keys too.
    pub(crate) fn note_reach(&mut self, content: ContentIndex, was_in_reach: bool) {
        let is_in_reach = self.is_in_reach(content);
        if is_in_reach == was_in_reach {
            return;
        }
        for key in self.catalog.keys_of(content) {
            let name = self.catalog.entry(key).key;
            let change = if is_in_reach { Change::Stored } else { Change::Gone };
            self.catalog.note(change(name));
        }
    }
}
