//! A worker process of a measurement: takes orders from its standard input until it ends.

use std::io::{self, BufRead, Read as _, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;

use cascade_block::BlockKey;
use cascade_client::{Client, ConnectOptions};
use cascade_memory::{Slab, SlabMut, copy_in, copy_out};
use cascade_store::{BlockStore as _, GetOutcome, Put, ViewOutcome};

use super::echo::FRAME_BYTES;
use super::order::{Blocks, Order, Report, Work};
use super::{PATIENT, all_stored, machine_ns, puts, rest_until};
use crate::measure::index::Random;
use crate::measure::keys;
use crate::payload;

/// Different blocks that a churn asks for.
const CHURN_KEYS: usize = 4096;
/// Blocks of one call of a churn.
const CHURN_BATCH: usize = 8;
/// The smallest block of a churn.
const CHURN_BYTES_MIN: usize = 4 << 10;
/// Sizes of a churn's blocks, each twice the one before.
const CHURN_SIZES: usize = 7;

/// Takes orders until there are no more.
pub fn run(orders: impl BufRead, mut reports: impl Write) -> io::Result<()> {
    let mut worker = Worker::default();
    for line in orders.lines() {
        let order = serde_json::from_str::<Order>(&line?).map_err(io::Error::other)?;
        let mut report = |report: &Report| -> io::Result<()> {
            serde_json::to_writer(&mut reports, report)?;
            reports.write_all(b"\n")?;
            reports.flush()
        };
        if let Order::Echo { socket } = order {
            let listener = UnixListener::bind(socket)?;
            report(&Report::Done)?;
            echo(&listener)?;
            continue;
        }
        let done = worker.follow(&order).unwrap_or_else(Report::Failed);
        report(&done)?;
    }
    Ok(())
}

/// Sends back what one connection says, until it ends.
fn echo(listener: &UnixListener) -> io::Result<()> {
    let mut stream = listener.accept()?.0;
    let mut frame = [0; FRAME_BYTES];
    while stream.read_exact(&mut frame).is_ok() {
        stream.write_all(&frame)?;
    }
    Ok(())
}

/// What a worker has.
#[derive(Debug, Default)]
struct Worker {
    client: Option<Client>,
    size: usize,
    batch: usize,
    keys: Vec<BlockKey>,
    source: Vec<u8>,
    buffer: Vec<u8>,
    reserved: Vec<SlabMut>,
    held: Vec<Slab>,
}

/// One pass over all blocks: how many, and how many of them were hits.
type Pass = Result<(u64, u64), String>;

impl Worker {
    fn client(&self) -> Result<&Client, String> {
        self.client.as_ref().ok_or_else(|| "it is not connected".to_owned())
    }

    fn follow(&mut self, order: &Order) -> Result<Report, String> {
        match order {
            Order::Echo { .. } => return Err("an echo comes first".to_owned()),
            Order::Open { socket } => self.open(socket)?,
            Order::Blocks(blocks) => self.name(blocks),
            Order::Warm { label, count, size } => self.warm(label, *count, *size)?,
            Order::Reserve => self.reserve()?,
            Order::Hold => self.hold()?,
            Order::Drop => (self.reserved, self.held) = (Vec::new(), Vec::new()),
            Order::Work { work, start_ns, stop_ns } => {
                return self.work(*work, *start_ns, *stop_ns);
            }
            Order::Check => self.check()?,
        }
        Ok(Report::Done)
    }

    fn open(&mut self, socket: &Path) -> Result<(), String> {
        let client = Client::connect(ConnectOptions::new(socket));
        self.client = Some(client.map_err(|error| error.to_string())?);
        Ok(())
    }

    fn name(&mut self, blocks: &Blocks) {
        let Blocks { label, first, count, size, batch } = blocks;
        self.keys = keys(label, first + count).split_off(*first);
        (self.size, self.batch) = (*size, (*batch).max(1));
        self.source = vec![0; count * size];
        let pieces = self.source.chunks_exact_mut(*size);
        self.keys.iter().zip(pieces).for_each(|(key, block)| payload::fill(key, block));
        self.buffer = vec![1; count * size];
    }

    fn warm(&self, label: &str, count: usize, size: usize) -> Result<(), String> {
        let client = self.client()?;
        let bytes = vec![3; size];
        for key in keys(label, count) {
            all_stored(&client.put(&puts(&[key], &bytes, size), PATIENT))?;
        }
        client.clear();
        Ok(())
    }

    fn reserve(&mut self) -> Result<(), String> {
        let client = self.client()?;
        let one = |_: &BlockKey| client.reserve(self.size, PATIENT).map_err(|e| e.to_string());
        self.reserved = self.keys.iter().map(one).collect::<Result<_, _>>()?;
        Ok(())
    }

    fn hold(&mut self) -> Result<(), String> {
        let views = self.client()?.view(&self.keys, PATIENT).into_iter().map(|view| match view {
            ViewOutcome::Hit { slab, .. } => Ok(slab),
            other => Err(format!("a block that was put gave {other:?}")),
        });
        self.held = views.collect::<Result<_, _>>()?;
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        for (key, block) in self.keys.iter().zip(self.buffer.chunks_exact(self.size)) {
            payload::check(key, block, self.size)
                .map_err(|wrong| format!("WRONG BYTE of {key}: {wrong:?}"))?;
        }
        Ok(())
    }

    fn work(&mut self, work: Work, start: u64, stop: Option<u64>) -> Result<Report, String> {
        if let (Work::Churn(seed), Some(stop_ns)) = (work, stop) {
            return self.churn(seed, stop_ns);
        }
        // What is not read anew is found wrong later.
        self.buffer.chunks_mut(4096).for_each(|page| page[0] ^= 0xff);
        rest_until(start);
        let began_ns = machine_ns();
        let (mut blocks, mut hits) = (0, 0);
        loop {
            let (more, found) = self.pass(work)?;
            blocks += more;
            hits += found;
            let ended_ns = machine_ns();
            if stop.is_none_or(|stop| ended_ns >= stop) {
                return Ok(Report::Span { began_ns, ended_ns, blocks, hits });
            }
        }
    }

    fn pass(&mut self, work: Work) -> Pass {
        let batch_bytes = self.batch * self.size;
        match work {
            Work::CopyIn => Ok(self.copy_in(<[u8]>::copy_from_slice)),
            Work::StreamIn => Ok(self.copy_in(copy_in)),
            Work::CopyOut => Ok(self.copy_out(<[u8]>::copy_from_slice)),
            Work::StreamOut => Ok(self.copy_out(|to, from| copy_out(to, from, batch_bytes))),
            Work::Put => self.put(),
            Work::Get => self.get(),
            Work::Churn(_) => Err("a churn needs a time to stop".to_owned()),
        }
    }

    fn copy_in(&mut self, copy: impl Fn(&mut [u8], &[u8])) -> (u64, u64) {
        let pieces = self.source.chunks_exact(self.size);
        self.reserved.iter_mut().zip(pieces).for_each(|(slab, block)| copy(slab, block));
        (self.reserved.len() as u64, 0)
    }

    fn copy_out(&mut self, copy: impl Fn(&mut [u8], &[u8])) -> (u64, u64) {
        let mut pieces = self.buffer.chunks_exact_mut(self.size);
        self.reserved.iter().zip(&mut pieces).for_each(|(slab, block)| copy(block, slab));
        self.held.iter().zip(&mut pieces).for_each(|(slab, block)| copy(block, slab));
        ((self.reserved.len() + self.held.len()) as u64, 0)
    }

    fn put(&self) -> Pass {
        let client = self.client()?;
        let pieces = self.source.chunks(self.batch * self.size);
        for (keys, bytes) in self.keys.chunks(self.batch).zip(pieces) {
            all_stored(&client.put(&puts(keys, bytes, self.size), PATIENT))?;
        }
        Ok((self.keys.len() as u64, 0))
    }

    fn get(&mut self) -> Pass {
        let client = self.client.as_ref().ok_or("it is not connected")?;
        let mut buffers: Vec<&mut [u8]> = self.buffer.chunks_exact_mut(self.size).collect();
        let pieces = buffers.chunks_mut(self.batch);
        for (keys, buffers) in self.keys.chunks(self.batch).zip(pieces) {
            let outcomes = client.get(keys, buffers, PATIENT);
            let is_no_hit = |outcome: &&GetOutcome| !matches!(outcome, GetOutcome::Hit { .. });
            if let Some(bad) = outcomes.iter().find(is_no_hit) {
                return Err(format!("a get gave {bad:?}"));
            }
        }
        Ok((self.keys.len() as u64, self.keys.len() as u64))
    }

    /// What workers do all day, at random, with every byte checked.
    fn churn(&self, seed: u64, stop_ns: u64) -> Result<Report, String> {
        let client = self.client()?;
        let (mut random, keys) = (Random(seed), keys("churn", CHURN_KEYS));
        let (mut blocks, mut hits, began_ns) = (0, 0, machine_ns());
        let mut draw = || usize::try_from(random.next() >> 33).unwrap_or(0);
        let mut bytes = vec![0; CHURN_BATCH * churn_bytes(CHURN_SIZES - 1)];
        while machine_ns() < stop_ns {
            let first = draw() % (CHURN_KEYS - CHURN_BATCH);
            let chosen = &keys[first..first + CHURN_BATCH];
            let lengths: Vec<usize> = (first..first + CHURN_BATCH).map(churn_bytes).collect();
            let mut rest = bytes.as_mut_slice();
            let mut pieces = Vec::with_capacity(CHURN_BATCH);
            for length in &lengths {
                let (piece, tail) = rest.split_at_mut(*length);
                pieces.push(piece);
                rest = tail;
            }
            match draw() % 16 {
                0..5 => put_some(client, chosen, &mut pieces),
                5 => drop(client.delete(chosen)),
                _ => hits += get_some(client, chosen, &mut pieces)?,
            }
            blocks += CHURN_BATCH as u64;
        }
        Ok(Report::Span { began_ns, ended_ns: machine_ns(), blocks, hits })
    }
}

/// Declined or busy is an answer here; what counts is what is there later.
fn put_some(client: &Client, keys: &[BlockKey], pieces: &mut [&mut [u8]]) {
    keys.iter().zip(&mut *pieces).for_each(|(key, piece)| payload::fill(key, piece));
    let puts: Vec<Put<'_>> =
        keys.iter().zip(&*pieces).map(|(key, piece)| Put::new(*key, piece)).collect();
    drop(client.put(&puts, PATIENT));
}

/// How many were there; a byte that is not what its key says is an error.
fn get_some(client: &Client, keys: &[BlockKey], pieces: &mut [&mut [u8]]) -> Result<u64, String> {
    let mut hits = 0;
    let outcomes = client.get(keys, pieces, PATIENT);
    for ((key, piece), outcome) in keys.iter().zip(&*pieces).zip(outcomes) {
        match outcome {
            GetOutcome::Hit { bytes, .. } => {
                payload::check(key, &piece[..bytes], piece.len())
                    .map_err(|wrong| format!("WRONG BYTE of {key}: {wrong:?}"))?;
                hits += 1;
            }
            GetOutcome::TooShort { needed_bytes } => {
                return Err(format!("{key} has {needed_bytes} bytes, not {}", piece.len()));
            }
            _ => {}
        }
    }
    Ok(hits)
}

/// A block's length in a churn: a function of its number, so that every reader knows it.
fn churn_bytes(number: usize) -> usize {
    CHURN_BYTES_MIN << (number % CHURN_SIZES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(orders: &[Order]) -> Vec<Report> {
        let lines = orders.iter().map(|order| serde_json::to_string(order).unwrap() + "\n");
        let mut reports = Vec::new();
        run(lines.collect::<String>().as_bytes(), &mut reports).unwrap();
        let reports = String::from_utf8(reports).unwrap();
        reports.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn what_cannot_be_done_is_reported_and_the_worker_goes_on() {
        let blocks = Blocks { label: "x".into(), first: 1, count: 2, size: 4096, batch: 1 };
        let work = |work| Order::Work { work, start_ns: 0, stop_ns: None };
        let orders = [
            work(Work::Put),
            Order::Open { socket: "/no/such/socket".into() },
            Order::Blocks(blocks),
            work(Work::CopyIn),
            work(Work::Churn(1)),
        ];
        let reports = answers(&orders);
        assert_eq!(reports.len(), orders.len());
        let failed = |at: usize| matches!(reports[at], Report::Failed(_));
        assert!(failed(0) && failed(1) && failed(4), "{reports:?}");
        assert_eq!(reports[2], Report::Done);
        assert!(matches!(reports[3], Report::Span { blocks: 0, .. }), "nothing was reserved");
    }

    #[test]
    fn bytes_that_were_not_read_are_found_wrong() {
        let mut worker = Worker::default();
        let blocks = Blocks { label: "x".into(), first: 0, count: 2, size: 8192, batch: 1 };
        worker.name(&blocks);
        assert!(worker.check().is_err_and(|why| why.contains("WRONG BYTE")));
        worker.buffer.clone_from(&worker.source);
        assert_eq!(worker.check(), Ok(()));
        worker.work(Work::CopyOut, 0, None).unwrap();
        assert!(worker.check().is_err(), "no slab was copied, so the old bytes do not pass");
    }

    #[test]
    fn a_churns_largest_block_is_what_its_memory_is_made_for() {
        let most = (0..CHURN_KEYS).map(churn_bytes).max();
        assert_eq!(most, Some(churn_bytes(CHURN_SIZES - 1)));
    }
}
