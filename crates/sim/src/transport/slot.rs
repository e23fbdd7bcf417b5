//! What a run of memory may hold, byte for byte.

/// A run of memory that one client writes, one batch at a time.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    /// What it holds, but for batches whose end is not known.
    sure: Vec<u8>,
    posted: Vec<Posted>,
    /// The batch that was posted last.
    last: Option<u64>,
}

/// A batch that was posted and whose end is not known: any of its bytes may be there, or come.
#[derive(Debug, Clone)]
pub(super) struct Posted {
    pub(super) batch: u64,
    /// The number of its connection.
    pub(super) connection: u64,
    /// What it moves to each byte of the slot, if anything.
    pub(super) image: Vec<Option<u8>>,
    /// Whether other bytes may come, because the network changes some.
    pub(super) may_damage: bool,
    /// Whether no more of its bytes come.
    pub(super) is_settled: bool,
}

/// A byte that the slot must not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) at: usize,
    pub(super) found: u8,
    pub(super) expected: u8,
}

impl Posted {
    /// Whether the byte may come there.
    fn brings(&self, at: usize, byte: u8) -> bool {
        self.image[at].is_some_and(|ours| ours == byte || self.may_damage)
    }
}

impl Slot {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self { sure: bytes, posted: vec![], last: None }
    }

    /// What it holds, if that is known.
    pub(super) fn known(&self) -> Option<&[u8]> {
        self.posted.is_empty().then_some(&self.sure)
    }

    /// Its owner has filled it.
    pub(super) fn fill(&mut self, bytes: Vec<u8>) {
        debug_assert!(self.posted.is_empty(), "only a slot that no batch uses is filled");
        self.sure = bytes;
    }

    pub(super) fn post(&mut self, posted: Posted) {
        self.last = Some(posted.batch);
        self.posted.push(posted);
    }

    /// The connections of batches whose end is not known.
    pub(super) fn connections(&self) -> Vec<u64> {
        self.posted.iter().map(|posted| posted.connection).collect()
    }

    /// The batch that was posted last.
    pub(super) fn last(&self) -> Option<u64> {
        self.last
    }

    /// Whether batches of other connections than this one may still come.
    pub(super) fn is_contested(&self, connection: u64) -> bool {
        let others = self.posted.iter().filter(|posted| !posted.is_settled);
        others.into_iter().any(|posted| posted.connection != connection)
    }

    /// The batch has ended without success: no more of its bytes come.
    pub(super) fn settle(&mut self, batch: u64) {
        let ours = self.posted.iter_mut().filter(|posted| posted.batch == batch);
        ours.for_each(|posted| posted.is_settled = true);
    }

    /// None of the batch's bytes came, nor do they.
    pub(super) fn forget(&mut self, batch: u64) {
        self.posted.retain(|posted| posted.batch != batch);
    }

    /// The first byte of a batch that has not arrived, by what the slot holds now. Earlier batches
    /// of other connections may have replaced some.
    pub(super) fn missing(&self, batch: u64, actual: &[u8]) -> Option<Wrong> {
        let posted = self.posted.iter().find(|posted| posted.batch == batch)?;
        let is_wrong = |(at, found): (usize, u8)| {
            let expected = posted.image[at]?;
            let may_replace =
                |other: &&Posted| other.connection != posted.connection && !other.is_settled;
            let mut others = self.posted.iter().filter(may_replace);
            let is_right = found == expected || others.any(|other| other.brings(at, found));
            (!is_right).then_some(Wrong { at, found, expected })
        };
        actual.iter().copied().enumerate().find_map(is_wrong)
    }

    /// The batch was confirmed: its bytes are there, and no earlier ones of its connection come.
    pub(super) fn confirm(&mut self, batch: u64) {
        let Some(at) = self.posted.iter().position(|posted| posted.batch == batch) else {
            return;
        };
        let confirmed = self.posted.remove(at);
        for (sure, byte) in self.sure.iter_mut().zip(&confirmed.image) {
            *sure = byte.unwrap_or(*sure);
        }
        let same = self.posted.iter_mut().filter(|it| it.connection == confirmed.connection);
        same.for_each(|posted| posted.is_settled = true);
    }

    /// Compares with what the slot holds. `is_over` tells whether a connection moves no more bytes.
    pub(super) fn compare(
        &mut self,
        actual: &[u8],
        is_over: impl Fn(u64) -> bool,
    ) -> Option<Wrong> {
        let wrong = if actual == self.sure {
            None
        } else if self.posted.is_empty() {
            let pairs = actual.iter().zip(&self.sure);
            pairs.clone().position(|(found, expected)| found != expected)
        } else {
            (0..actual.len()).find(|at| !self.allows(*at, actual[*at]))
        };
        let wrong = wrong.map(|at| Wrong { at, found: actual[at], expected: self.sure[at] });
        for posted in self.posted.extract_if(.., |it| it.is_settled || is_over(it.connection)) {
            for (at, _) in posted.image.iter().enumerate().filter(|(_, byte)| byte.is_some()) {
                self.sure[at] = actual[at];
            }
        }
        if wrong.is_some() {
            // It is reported once.
            self.sure.copy_from_slice(actual);
        }
        wrong
    }

    fn allows(&self, at: usize, found: u8) -> bool {
        self.sure[at] == found || self.posted.iter().any(|posted| posted.brings(at, found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(batch: u64, connection: u64, image: &[Option<u8>]) -> Posted {
        let image = image.to_vec();
        Posted { batch, connection, image, may_damage: false, is_settled: false }
    }

    #[test]
    fn a_batch_may_be_there_in_part_until_it_is_confirmed() {
        let mut slot = Slot::new(vec![0; 6]);
        slot.post(posted(1, 7, &[None, Some(1), Some(2), None, Some(3), None]));
        let is_open = |_| false;
        assert_eq!(slot.compare(&[0, 1, 0, 0, 3, 0], is_open), None);
        assert!(slot.missing(1, &[0, 1, 0, 0, 3, 0]).is_some_and(|wrong| wrong.at == 2));
        assert!(slot.compare(&[0, 2, 0, 0, 0, 0], is_open).is_some(), "another byte of it");
        let mut slot = Slot::new(vec![0; 6]);
        slot.post(posted(1, 7, &[None, Some(1), Some(2), None, None, None]));
        assert!(slot.compare(&[9, 1, 2, 0, 0, 0], is_open).is_some(), "outside of it");
        let mut slot = Slot::new(vec![0; 6]);
        slot.post(posted(1, 7, &[None, Some(1), Some(2), None, None, None]));
        assert_eq!(slot.missing(1, &[0, 1, 2, 0, 0, 0]), None);
        slot.confirm(1);
        assert!(slot.compare(&[0; 6], is_open).is_some(), "it was lost");
    }

    #[test]
    fn a_lost_batch_may_come_until_its_connection_has_ended() {
        let mut slot = Slot::new(vec![0; 2]);
        slot.post(posted(1, 7, &[Some(1), None]));
        assert_eq!(slot.compare(&[0, 0], |_| false), None);
        slot.post(posted(2, 8, &[Some(2), None]));
        assert_eq!(slot.missing(2, &[1, 0]), None, "the first one may come later");
        slot.confirm(2);
        assert_eq!(slot.compare(&[1, 0], |connection| connection == 7), None);
        assert_eq!(slot.known(), Some(&[1, 0][..]));
        assert!(slot.compare(&[2, 0], |_| false).is_some());
    }
}
