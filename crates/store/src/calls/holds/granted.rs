//! The granted holds of a client by number, in groups of ascending numbers.
//!
//! A call grants a range of numbers, and clients release and seal ranges. The holds of one call are
//! in one vector, so that granting, sealing or releasing all of them takes one search, not one for
//! each.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{HeldMemory, Hold};

/// Granted holds by number.
#[derive(Debug)]
pub(super) struct GrantedHolds<G> {
    /// Groups by a number that is at most their first one. Their numbers do not interleave: the
    /// group of a number is the last one whose key is not above it.
    groups: BTreeMap<u64, Group<G>>,
}

/// Holds in the order of their numbers. Those that were released leave a gap.
#[derive(Debug)]
pub(super) struct Group<G> {
    holds: Vec<(u64, Option<Hold<G>>)>,
    /// The number of holds that are left.
    left: usize,
}

impl<G> Default for GrantedHolds<G> {
    fn default() -> Self {
        Self { groups: BTreeMap::new() }
    }
}

impl<G> GrantedHolds<G> {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Hold<G>> {
        self.groups.values().flat_map(|group| &group.holds).filter_map(|(_, hold)| hold.as_ref())
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Hold<G>> {
        let holds = self.groups.values_mut().flat_map(|group| &mut group.holds);
        holds.filter_map(|(_, hold)| hold.as_mut())
    }

    /// Removes all.
    pub(super) fn take_all(&mut self) -> Vec<Hold<G>> {
        let groups = std::mem::take(&mut self.groups).into_values();
        groups.flat_map(|group| group.holds).filter_map(|(_, hold)| hold).collect()
    }

    /// Prepares a group for these numbers. False if one of them is held.
    pub(super) fn make_way(&mut self, numbers: &Range<u64>) -> bool {
        let overlapping = self.first_key(numbers.start)..numbers.end.max(numbers.start);
        let is_held = |group: &Group<G>| {
            let first = group.index_of(numbers.start);
            let within = group.holds[first..].iter().take_while(|(it, _)| *it < numbers.end);
            within.into_iter().any(|(_, hold)| hold.is_some())
        };
        if self.groups.range(overlapping.clone()).any(|(_, group)| is_held(group)) {
            return false;
        }
        // Rare: clients count up. A group with numbers on both sides of the range is split.
        let keys: Vec<u64> = self.groups.range(overlapping).map(|(key, _)| *key).collect();
        for group in keys.into_iter().filter_map(|key| self.groups.remove(&key)).collect::<Vec<_>>()
        {
            let is_before = |(number, _): &(u64, _)| *number < numbers.start;
            let kept = group.holds.into_iter().filter(|(_, hold)| hold.is_some());
            let (before, after): (Vec<_>, Vec<_>) = kept.partition(is_before);
            for holds in [before, after] {
                if let Some((first, _)) = holds.first() {
                    self.groups.insert(*first, Group { left: holds.len(), holds });
                }
            }
        }
        true
    }

    /// The group of a call, with the numbers that [`Self::make_way`] was called with.
    pub(super) fn group(&mut self, call: &Range<u64>) -> &mut Group<G> {
        self.groups.entry(call.start).or_insert_with(|| {
            let most = usize::try_from(call.end - call.start).unwrap_or(usize::MAX);
            Group { holds: Vec::with_capacity(most.min(BATCH)), left: 0 }
        })
    }

    /// No more holds of these numbers are added.
    pub(super) fn finish(&mut self, call: &Range<u64>) {
        if let Some(group) = self.groups.get_mut(&call.start) {
            group.compact();
            if group.left == 0 {
                self.groups.remove(&call.start);
            }
        }
    }

    /// Removes the holds with these numbers.
    pub(super) fn remove(&mut self, numbers: &Range<u64>, removed: &mut Vec<Hold<G>>) {
        let overlapping = self.first_key(numbers.start)..numbers.end.max(numbers.start);
        let mut emptied = Vec::new();
        for (key, group) in self.groups.range_mut(overlapping) {
            let first = group.index_of(numbers.start);
            let within = group.holds[first..].iter_mut().take_while(|(it, _)| *it < numbers.end);
            let before = removed.len();
            removed.extend(within.filter_map(|(_, hold)| hold.take()));
            group.left -= removed.len() - before;
            group.compact();
            if group.left == 0 {
                emptied.push(*key);
            }
        }
        for key in emptied {
            self.groups.remove(&key);
        }
    }

    /// Removes the holds with these numbers that are slabs which the client writes. A lease stays:
    /// its memory belongs to a block that is stored already. Calls `take` for each number.
    pub(super) fn take_slabs(
        &mut self,
        numbers: impl IntoIterator<Item = u64>,
        mut take: impl FnMut(Option<Hold<G>>),
    ) {
        let mut numbers = numbers.into_iter().peekable();
        while let Some(first) = numbers.next() {
            let from = self.first_key(first);
            let mut groups = self.groups.range_mut(from..);
            let Some((key, group)) = groups.next().map(|(key, group)| (*key, group)) else {
                take(None);
                continue;
            };
            // The numbers of one call mostly follow each other: one search finds all of them.
            let end = groups.next().map_or(u64::MAX, |(next, _)| *next);
            take(group.take_slab(first));
            while let Some(number) = numbers.next_if(|number| (key..end).contains(number)) {
                take(group.take_slab(number));
            }
            if group.left == 0 {
                self.groups.remove(&key);
            } else {
                group.compact();
            }
        }
    }

    /// The key of the group that may have this number; the number if there is none.
    fn first_key(&self, number: u64) -> u64 {
        self.groups.range(..=number).next_back().map_or(number, |(key, _)| *key)
    }
}

/// Most entries of a new group before it grows.
const BATCH: usize = 256;

impl<G> Group<G> {
    /// Adds a hold. Returns it if its number is held.
    pub(super) fn insert(&mut self, number: u64, hold: Hold<G>) -> Option<Hold<G>> {
        let at = self.index_of(number);
        match self.holds.get_mut(at) {
            Some((it, Some(_))) if *it == number => return Some(hold),
            Some((it, place)) if *it == number => *place = Some(hold),
            // Mostly the end, because a call grants in the order of its blocks.
            _ => self.holds.insert(at, (number, Some(hold))),
        }
        self.left += 1;
        None
    }

    /// Removes a hold if it is a slab.
    fn take_slab(&mut self, number: u64) -> Option<Hold<G>> {
        let at = self.index_of(number);
        let (it, place) = self.holds.get_mut(at)?;
        let is_slab = |hold: &mut Hold<G>| matches!(hold.memory, HeldMemory::Slab(_));
        let taken = place.take_if(|hold| *it == number && is_slab(hold))?;
        self.left -= 1;
        Some(taken)
    }

    /// The place of the first entry whose number is not below this one.
    fn index_of(&self, number: u64) -> usize {
        // Without gaps before it, the place follows from the number.
        let first = self.holds.first().map_or(number, |(first, _)| *first);
        let guess = usize::try_from(number.saturating_sub(first)).unwrap_or(usize::MAX);
        let guess = guess.min(self.holds.len());
        let is_after = self.holds[..guess].last().is_none_or(|(before, _)| *before < number);
        let is_before = self.holds.get(guess).is_none_or(|(it, _)| *it >= number);
        if is_after && is_before {
            return guess;
        }
        self.holds.partition_point(|(it, _)| *it < number)
    }

    /// Frees the memory of released holds once they are more than half: a client must not keep more
    /// memory of the node than it has holds.
    fn compact(&mut self) {
        if self.left * 2 >= self.holds.capacity() || self.left == 0 {
            return;
        }
        self.holds.retain(|(_, hold)| hold.is_some());
        self.holds.shrink_to(self.left);
    }
}

#[cfg(test)]
impl<G> GrantedHolds<G> {
    /// Entries that memory is allocated for.
    pub(super) fn capacity(&self) -> usize {
        self.groups.values().map(|group| group.holds.capacity()).sum()
    }
}
