//! Batches of a client: which pieces they move, and what the model knows of them beforehand.

use std::sync::Arc;

use cascade_transport::{
    Batch, Direction, Piece, Place, Refusal, RegionId, Ticket, TransportError,
};

use super::super::process::{Linked, SOURCE_BYTES, notice_of};
use super::super::shared::PostedNotice;
use super::super::slot::Posted;
use super::Caller;

/// Pieces of a batch that takes more than one frame: pieces of one byte each.
const WIDE_PIECES: usize = 10_000;
/// From this length on a batch is divided among the streams of a connection.
const DIVIDED_BYTES_MIN: u64 = 2048;

/// A batch that was posted.
pub(super) struct InFlight {
    pub(super) plan: Plan,
    pub(super) linked: Arc<Linked>,
    pub(super) ticket: Ticket,
}

/// What a batch is to do.
pub(super) struct Plan {
    pub(super) batch: u64,
    pub(super) direction: Direction,
    pub(super) pieces: Vec<Piece>,
    pub(super) notice: Option<Vec<u8>>,
    /// The slot at the target that a write changes.
    pub(super) slot: usize,
    /// What it moves to each byte of the slot that it changes: at the target, or here.
    pub(super) image: Vec<Option<u8>>,
    /// What is wrong with one of its pieces.
    pub(super) bad: Option<Bad>,
    /// The region that it reads, if that one comes and goes, and whether it had gone before.
    pub(super) passing: Option<(RegionId, bool)>,
}

/// Why a batch is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bad {
    Remote(Refusal),
    Local(Refusal),
}

/// A run of a slot: its offset and its length.
type Range = (usize, usize);

impl Plan {
    /// Whether all of its pieces are empty.
    pub(super) fn moves_nothing(&self) -> bool {
        self.pieces.iter().all(|piece| piece.bytes == 0)
    }

    /// Whether it takes one frame: all of it is refused before anything is moved, or nothing is.
    pub(super) fn is_one_frame(&self, streams: usize) -> bool {
        let bytes: u64 = self.pieces.iter().map(|piece| piece.bytes).sum();
        self.pieces.len() < WIDE_PIECES && (streams == 1 || bytes < DIVIDED_BYTES_MIN)
    }
}

impl Caller {
    /// The place of this client's slot in its process.
    fn local_place(&self, slot: usize, at: usize) -> Place {
        let index = self.client * self.local.len() + slot;
        let offset = (self.process.offset_of(index) + at) as u64;
        Place { region: self.process.regions.local, offset }
    }

    /// Compares its own memory with what it must hold.
    pub(super) fn check_local(&mut self, slot: usize) {
        let actual = self.fetch_local(slot);
        if let Some(wrong) = self.local[slot].compare(&actual, |_| false) {
            let (process, client) = (self.process.number, self.client);
            self.shared.state().findings.add_wrong_bytes(format_args!(
                "slot {slot} of client {process}/{client} was changed: {wrong:?}"
            ));
        }
    }

    pub(super) fn fetch_local(&self, slot: usize) -> Vec<u8> {
        let Place { region, offset } = self.local_place(slot, 0);
        let mut bytes = vec![0; self.shared.profile.slot_bytes];
        self.process.endpoint.fetch(region, offset, &mut bytes).expect("it is in its region");
        bytes
    }

    /// Checks its own memory, and fills it with other bytes now and then.
    fn renew_local(&mut self, slot: usize) -> Vec<u8> {
        self.check_local(slot);
        let mut bytes = self.local[slot].known().expect("no batch uses it").to_vec();
        if self.random.one_in(2) {
            let Place { region, offset } = self.local_place(slot, 0);
            self.random.fill(&mut bytes);
            self.process.endpoint.fill(region, offset, &bytes).expect("it is in its region");
            self.local[slot].fill(bytes.clone());
        }
        bytes
    }

    /// Posts a batch of a slot that has none in flight.
    pub(super) fn post(&mut self, slot: usize) {
        let to = self.target();
        if let Some(linked) = self.linked(to) {
            self.post_to(slot, linked);
        }
    }

    pub(super) fn post_to(&mut self, slot: usize, linked: Arc<Linked>) {
        let plan = self.plan(slot, &linked);
        self.send(slot, plan, linked);
    }

    /// Posts a batch with one piece that is refused.
    pub(super) fn post_bad(&mut self, slot: usize) {
        self.finish(slot);
        let to = self.target();
        let Some(linked) = self.linked(to) else { return };
        let mut plan = self.plan(slot, &linked);
        let (piece, bad) = self.bad_piece(slot, &plan, &linked);
        let at = self.random.index_below(plan.pieces.len() + 1);
        plan.pieces.insert(at, piece);
        plan.bad = Some(bad);
        self.send(slot, plan, linked);
        self.finish(slot);
    }

    fn bad_piece(&mut self, slot: usize, plan: &Plan, linked: &Linked) -> (Piece, Bad) {
        let regions = linked.target.regions;
        let here = self.local_place(slot, 0);
        let there = Place { region: regions.shared, offset: 0 };
        let far = [u64::MAX, 1 << 40, u64::MAX - 5][self.random.index_below(3)];
        let forbidden = match plan.direction {
            Direction::Write => [regions.source, regions.local],
            Direction::Read => [regions.sink, regions.local],
        };
        let forbidden = forbidden[self.random.index_below(2)];
        let at = |region, offset| Place { region, offset };
        let (local, remote, bad) = match self.random.below(5) {
            0 => (here, at(regions.shared, far), Bad::Remote(Refusal::OutOfBounds)),
            1 => (here, at(RegionId(77), 0), Bad::Remote(Refusal::UnknownRegion)),
            2 => (here, at(forbidden, 0), Bad::Remote(Refusal::NotAllowed)),
            3 => (at(here.region, far), there, Bad::Local(Refusal::OutOfBounds)),
            _ => (at(RegionId(77), 0), there, Bad::Local(Refusal::UnknownRegion)),
        };
        let bytes = 1 + self.random.below(8);
        (Piece { local, remote, bytes }, bad)
    }

    /// Draws a batch.
    fn plan(&mut self, slot: usize, linked: &Linked) -> Plan {
        let bytes = self.renew_local(slot);
        let ranges = self.draw_ranges(bytes.len());
        let batch = self.shared.next_batch();
        let has_notice = self.random.one_in(2);
        let notice = has_notice.then(|| notice_of(batch, &mut self.random));
        let profile = &self.shared.profile;
        let own = (self.process.number * profile.clients + self.client) * profile.slots + slot;
        let half = profile.clients_of_all() * profile.slots;
        let is_read = self.random.one_in(2);
        let mut plan = Plan {
            batch,
            direction: if is_read { Direction::Read } else { Direction::Write },
            pieces: vec![],
            notice,
            slot: own,
            image: vec![None; bytes.len()],
            bad: None,
            passing: None,
        };
        if is_read {
            self.plan_read(&mut plan, slot, &ranges, linked);
            return plan;
        }
        if self.random.one_in(3) {
            plan.slot += half;
        }
        let (region, offset) = linked.target.place_of(plan.slot);
        for (to, length) in ranges {
            let from = self.random.index_below(bytes.len() - length + 1);
            // Neighbours on both sides are merged.
            let from = if self.random.one_in(3) { to } else { from };
            let remote = Place { region, offset: (offset + to) as u64 };
            let local = self.local_place(slot, from);
            plan.pieces.push(Piece { local, remote, bytes: length as u64 });
            for (image, byte) in plan.image[to..to + length].iter_mut().zip(&bytes[from..]) {
                *image = Some(*byte);
            }
        }
        plan
    }

    /// Plans a read of the bytes that this client wrote, if they are known, or of a region that is
    /// never written.
    fn plan_read(&mut self, plan: &mut Plan, slot: usize, ranges: &[Range], linked: &Linked) {
        let known = linked.target.slots()[plan.slot].known().map(<[u8]>::to_vec);
        let known = known.filter(|_| self.random.one_in(2));
        let passing = linked.target.passing.last().filter(|_| self.random.one_in(4));
        let (bytes, region, offset) = match (&known, &passing) {
            (_, Some((state, bytes))) => {
                plan.passing = Some((state.id, state.is_gone));
                (&bytes[..], state.id, 0)
            }
            (Some(known), None) => {
                let (region, offset) = linked.target.place_of(plan.slot);
                (&known[..], region, offset)
            }
            (None, None) => (&linked.target.source_bytes[..], linked.target.regions.source, 0),
        };
        debug_assert!(bytes.len() <= SOURCE_BYTES, "all slots are shorter");
        for (to, length) in ranges {
            let from = self.random.index_below(bytes.len() - length + 1);
            let remote = Place { region, offset: (offset + from) as u64 };
            let local = self.local_place(slot, *to);
            plan.pieces.push(Piece { local, remote, bytes: *length as u64 });
            for (image, byte) in plan.image[*to..to + length].iter_mut().zip(&bytes[from..]) {
                *image = Some(*byte);
            }
        }
    }

    /// Runs of a slot that do not overlap, in any order.
    fn draw_ranges(&mut self, bytes: usize) -> Vec<Range> {
        let random = &mut self.random;
        if bytes >= 2 * WIDE_PIECES && random.one_in(8) {
            return (0..WIDE_PIECES).map(|at| (2 * at, 1)).collect();
        }
        let most = [1, 3, 30][random.index_below(3)];
        let mut cuts: Vec<usize> = (0..2 * (1 + random.index_below(most)))
            .map(|_| random.index_below(bytes + 1))
            .collect();
        cuts.sort_unstable();
        let (pairs, _) = cuts.as_chunks::<2>();
        let mut ranges: Vec<Range> = pairs.iter().map(|[from, to]| (*from, to - from)).collect();
        if random.one_in(2) {
            for at in (1..ranges.len()).rev() {
                ranges.swap(at, random.index_below(at + 1));
            }
        }
        ranges
    }

    /// Tells the model of the batch, and posts it.
    fn send(&mut self, slot: usize, plan: Plan, linked: Arc<Linked>) {
        let posted = Posted {
            batch: plan.batch,
            connection: linked.number,
            image: plan.image.clone(),
            may_damage: self.shared.profile.conditions.flip_one_in > 0,
            is_settled: false,
        };
        match plan.direction {
            Direction::Write => linked.target.slots()[plan.slot].post(posted),
            Direction::Read => self.local[slot].post(posted),
        }
        if let Some(bytes) = &plan.notice {
            let notice = PostedNotice {
                from: self.process.endpoint.id(),
                to: linked.target.endpoint.id(),
                bytes: bytes.clone(),
                slot: (plan.direction == Direction::Write).then_some(plan.slot),
                is_confirmed: false,
                is_refused: false,
                is_seen: false,
            };
            self.shared.state().notices.insert(plan.batch, notice);
        }
        let deadline = self.deadline();
        let Plan { direction, .. } = plan;
        let batch = Batch { direction, pieces: &plan.pieces, notice: plan.notice.as_deref() };
        let connection = &linked.connection;
        let posted = self.timed("a post", deadline, || connection.post(&batch, deadline));
        self.shared.count("batches");
        match posted {
            Ok(ticket) => self.in_flight[slot] = Some(InFlight { plan, linked, ticket }),
            Err(error) => {
                self.check_error(&error, (&plan, &linked), deadline);
                if matches!(error, TransportError::Local { .. }) {
                    // Nothing was sent.
                    self.forget(slot, &plan, &linked);
                }
                self.failed(slot, &plan, &linked);
            }
        }
    }
}
