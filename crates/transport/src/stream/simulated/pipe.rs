//! One direction of a simulated connection: runs of bytes, each with the time of its arrival.

use std::collections::VecDeque;
use std::time::Duration;

use cascade_runtime::simulated::Random;

use super::conditions::{Conditions, Fate};
use crate::region::Span;

/// Bytes that arrive together.
#[derive(Debug)]
struct Run {
    arrival: Duration,
    bytes: Vec<u8>,
    taken: usize,
}

/// One direction of a simulated connection.
#[derive(Debug)]
pub(super) struct Pipe {
    runs: VecDeque<Run>,
    /// Bytes of all runs that are not taken.
    unread: usize,
    /// When the sender can send the next byte, by the bandwidth.
    free: Duration,
    last_arrival: Duration,
    /// Bytes that were sent, ever.
    sent: u64,
    fate: Fate,
    /// When the receiver sees that the sender has ended.
    pub(super) end: Option<Duration>,
    /// The receiver takes no more bytes.
    pub(super) is_deaf: bool,
}

/// What became of bytes that were to be sent.
pub(super) enum Put {
    Sent(usize),
    Full,
    /// The connection is reset at this byte.
    Reset,
}

impl Pipe {
    pub(super) fn new(fate: Fate) -> Self {
        Self {
            runs: VecDeque::new(),
            unread: 0,
            free: Duration::ZERO,
            last_arrival: Duration::ZERO,
            sent: 0,
            fate,
            end: None,
            is_deaf: false,
        }
    }

    /// Sends bytes of the spans. They arrive no earlier than `open`.
    pub(super) fn put(
        &mut self,
        spans: &[Span],
        conditions: &Conditions,
        random: &mut Random,
        (now, open): (Duration, Duration),
    ) -> Put {
        let left = |at: Option<u64>| at.map_or(u64::MAX, |at| at.saturating_sub(self.sent));
        let until_fault = left(self.fate.reset).min(left(self.fate.end));
        if until_fault == 0 && self.fate.reset.is_some_and(|at| at <= self.sent) {
            return Put::Reset;
        }
        let room = conditions.window_bytes.saturating_sub(self.unread);
        let most = conditions.call(random).min(room);
        let most = most.min(usize::try_from(until_fault).unwrap_or(usize::MAX));
        if most == 0 {
            return Put::Full;
        }
        let mut bytes = Vec::new();
        for span in spans {
            let count = span.bytes().min(most - bytes.len());
            span.append_to(count, &mut bytes);
            if bytes.len() == most {
                break;
            }
        }
        let count = bytes.len();
        let flip = self.fate.flip.and_then(|at| at.checked_sub(self.sent));
        let flip = flip.and_then(|at| bytes.get_mut(usize::try_from(at).ok()?));
        if let Some(byte) = flip {
            *byte ^= 1 << random.below(8);
        }
        self.sent += count as u64;
        let sending = match conditions.bytes_per_second {
            0 => 0,
            rate => (count as u64).saturating_mul(1_000_000_000) / rate,
        };
        self.free = self.free.max(now) + Duration::from_nanos(sending);
        let arrival = self.free.max(open) + conditions.delay(random);
        self.last_arrival = self.last_arrival.max(arrival);
        if !self.is_deaf {
            self.unread += count;
            self.runs.push_back(Run { arrival: self.last_arrival, bytes, taken: 0 });
        }
        if self.fate.end.is_some_and(|at| at <= self.sent) {
            self.end_sending(now, conditions, random);
        }
        Put::Sent(count)
    }

    /// The sender sends no more. The receiver sees it after all bytes.
    pub(super) fn end_sending(
        &mut self,
        now: Duration,
        conditions: &Conditions,
        random: &mut Random,
    ) {
        let end = self.last_arrival.max(now + conditions.delay(random));
        self.end.get_or_insert(end);
    }

    /// The receiver takes no more bytes. Returns whether some had not been taken.
    pub(super) fn end_receiving(&mut self) -> bool {
        self.is_deaf = true;
        let has_unread = self.unread > 0;
        self.lose();
        has_unread
    }

    /// Loses what is on its way.
    pub(super) fn lose(&mut self) {
        self.runs.clear();
        self.unread = 0;
    }

    /// Receives what has arrived, at most so many bytes.
    pub(super) fn take(&mut self, spans: &[Span], most: usize, now: Duration) -> usize {
        let mut taken = 0;
        for span in spans {
            let mut rest = *span;
            while rest.bytes() > 0 && taken < most {
                let Some(run) = self.runs.front_mut().filter(|run| run.arrival <= now) else {
                    return taken;
                };
                let bytes = &run.bytes[run.taken..];
                let count = bytes.len().min(rest.bytes()).min(most - taken);
                rest.fill_from(&bytes[..count]);
                rest = rest.after(count);
                run.taken += count;
                taken += count;
                self.unread -= count;
                if run.taken == run.bytes.len() {
                    self.runs.pop_front();
                }
            }
        }
        taken
    }

    /// When the receiver can go on: bytes, or the end.
    pub(super) fn next_arrival(&self) -> Option<Duration> {
        self.runs.front().map(|run| run.arrival).or(self.end)
    }

    /// Whether all bytes before the end were taken, and the end has arrived.
    pub(super) fn has_ended(&self, now: Duration) -> bool {
        self.runs.is_empty() && self.end.is_some_and(|end| end <= now)
    }
}
