//! Residences: which lower stages have a content's bytes, and at which addresses.
//!
//! A content has a bit for each stage that has it. The addresses of up to two stages are in its
//! entry, in the order of the stages. With more, all of them are in an entry of a second table. A
//! lookup needs only the bits, and stays within the cache line of the content.

use cascade_tier::tier::Address;

use super::{Catalog, Content, ContentIndex, LOWER_STAGES_MAX};

/// The addresses that fit into the entry of a content.
pub(super) const INLINE_ADDRESSES: usize = 2;

/// An address for each lower stage. That of a stage without its bit has no meaning.
pub(super) type StageAddresses = [u64; LOWER_STAGES_MAX];

const _: () = assert!(LOWER_STAGES_MAX < u8::BITS as usize, "a byte has a bit for each stage");

impl Content {
    /// Whether a lower stage has it.
    #[inline]
    pub(crate) fn has_address(&self, stage: usize) -> bool {
        self.stages & (1 << stage) != 0
    }

    /// The lower stages that have it: bit per stage.
    #[inline]
    pub(crate) fn stages(&self) -> u8 {
        self.stages
    }

    /// The fastest lower stage that has it, except those whose bit is set in `avoid`.
    #[inline]
    pub(crate) fn fastest_stage_except(&self, avoid: u8) -> Option<usize> {
        let usable = self.stages & !avoid;
        (usable != 0).then_some(usable.trailing_zeros() as usize)
    }

    /// Whether any tier has its bytes.
    pub(crate) fn is_in_any_tier(&self) -> bool {
        self.slab.is_some() || self.stages != 0
    }

    /// The index of its addresses in the second table, if they do not fit into the entry.
    fn outside(&self) -> Option<u32> {
        let is_outside = self.stages.count_ones() as usize > INLINE_ADDRESSES;
        is_outside
            .then(|| u32::try_from(self.addresses[0]).expect("the index of an entry has 32 bits"))
    }

    /// The place of a stage's address in the entry.
    fn rank(&self, stage: usize) -> usize {
        let faster = self.stages & ((1 << stage) - 1);
        faster.count_ones() as usize
    }
}

impl Catalog {
    /// Contents in a lower stage.
    pub(crate) fn stage_blocks(&self, stage: usize) -> u64 {
        self.stage_blocks[stage]
    }

    /// A content's address in a lower stage.
    pub(crate) fn address(&self, content: ContentIndex, stage: usize) -> Option<Address> {
        let entry = self.content(content);
        entry.has_address(stage).then(|| self.address_in(entry, stage))
    }

    /// The fastest lower stage that has a content, except those whose bit is set in `avoid`, and
    /// the address there.
    pub(crate) fn fastest_lower_except(
        &self,
        content: ContentIndex,
        avoid: u8,
    ) -> Option<(usize, Address)> {
        let entry = self.content(content);
        let stage = entry.fastest_stage_except(avoid)?;
        Some((stage, self.address_in(entry, stage)))
    }

    /// Sets a content's address in a lower stage. The only place to do so: it keeps the count.
    pub(crate) fn set_address(
        &mut self,
        content: ContentIndex,
        stage: usize,
        address: Option<Address>,
    ) {
        let entry = self.content(content);
        let (before, outside) = (entry.stages, entry.outside());
        let mut addresses = self.addresses_of(entry);
        let bit = 1 << stage;
        let after = match address {
            Some(Address(address)) => {
                addresses[stage] = address;
                before | bit
            }
            None => before & !bit,
        };
        self.stage_blocks[stage] -= u64::from(before & bit != 0);
        self.stage_blocks[stage] += u64::from(after & bit != 0);
        let is_outside = after.count_ones() as usize > INLINE_ADDRESSES;
        let index = match (outside, is_outside) {
            (Some(index), true) => {
                *self.many_addresses.get_mut(index) = addresses;
                Some(index)
            }
            (Some(index), false) => {
                self.many_addresses.remove(index);
                None
            }
            (None, true) => Some(self.many_addresses.insert(addresses)),
            (None, false) => None,
        };
        let entry = self.content_mut(content);
        entry.stages = after;
        if let Some(index) = index {
            entry.addresses[0] = u64::from(index);
            return;
        }
        let stages = (0..LOWER_STAGES_MAX).filter(|stage| after & (1 << stage) != 0);
        for (place, stage) in entry.addresses.iter_mut().zip(stages) {
            *place = addresses[stage];
        }
    }

    /// Drops the addresses of a content that was removed.
    pub(super) fn drop_addresses(&mut self, removed: &Content) {
        for (stage, count) in self.stage_blocks.iter_mut().enumerate() {
            *count -= u64::from(removed.has_address(stage));
        }
        if let Some(index) = removed.outside() {
            self.many_addresses.remove(index);
        }
    }

    /// The address in a stage that has the content.
    fn address_in(&self, entry: &Content, stage: usize) -> Address {
        Address(match entry.outside() {
            Some(index) => self.many_addresses.get(index)[stage],
            None => entry.addresses[entry.rank(stage)],
        })
    }

    fn addresses_of(&self, entry: &Content) -> StageAddresses {
        let of = |stage| {
            if entry.has_address(stage) { self.address_in(entry, stage).0 } else { 0 }
        };
        std::array::from_fn(of)
    }
}
