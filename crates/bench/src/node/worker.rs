//! A worker process of a measurement: executes commands from standard input until its end.

use std::io::{self, BufRead, Read as _, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;

use cascade_block::BlockKey;
use cascade_client::{Client, ConnectOptions};
use cascade_memory::{HostSlab, HostSlabMut, copy_in, copy_out};
use cascade_replay::payload;
use cascade_replay::random::SplitMix64;
use cascade_store::{BlockStore as _, GetOutcome, Put, ViewOutcome};

use super::echo_process::FRAME_BYTES;
use super::protocol::{Work, WorkerBlocks, WorkerCommand, WorkerReport};
use super::{CALL_OPTIONS, all_stored, machine_ns, puts, reserve, sleep_until};
use crate::keys;

/// Unique blocks of a churn.
const CHURN_KEYS: usize = 4096;
/// Blocks of one call of a churn.
const CHURN_BATCH: usize = 8;
/// Size of the smallest block of a churn.
const CHURN_BYTES_MIN: usize = 4 << 10;
/// Number of block sizes of a churn; each is twice the one before.
const CHURN_SIZES: usize = 7;

/// Executes commands until the end of the input.
pub fn run(commands: impl BufRead, mut reports: impl Write) -> io::Result<()> {
    let mut worker = WorkerState::default();
    for line in commands.lines() {
        let command = serde_json::from_str::<WorkerCommand>(&line?).map_err(io::Error::other)?;
        let mut report = |report: &WorkerReport| -> io::Result<()> {
            serde_json::to_writer(&mut reports, report)?;
            reports.write_all(b"\n")?;
            reports.flush()
        };
        if let WorkerCommand::Echo { socket } = command {
            // The report comes first: the measurement connects after it.
            let listener = UnixListener::bind(socket)?;
            report(&WorkerReport::Done)?;
            echo(&listener)?;
            continue;
        }
        let done = worker.execute(&command).unwrap_or_else(WorkerReport::Failed);
        report(&done)?;
    }
    Ok(())
}

/// Echoes the messages of one connection until it ends.
fn echo(listener: &UnixListener) -> io::Result<()> {
    let mut stream = listener.accept()?.0;
    let mut frame = [0; FRAME_BYTES];
    while stream.read_exact(&mut frame).is_ok() {
        stream.write_all(&frame)?;
    }
    Ok(())
}

/// The connection and the blocks of a worker.
#[derive(Debug, Default)]
struct WorkerState {
    client: Option<Client>,
    size: usize,
    batch: usize,
    keys: Vec<BlockKey>,
    source: Vec<u8>,
    buffer: Vec<u8>,
    reserved: Vec<HostSlabMut>,
    held: Vec<HostSlab>,
}

/// The blocks and hits of one pass over all blocks.
type PassResult = Result<(u64, u64), String>;

impl WorkerState {
    fn client(&self) -> Result<&Client, String> {
        self.client.as_ref().ok_or_else(|| "the worker is not connected".to_owned())
    }

    fn execute(&mut self, command: &WorkerCommand) -> Result<WorkerReport, String> {
        match command {
            WorkerCommand::Echo { .. } => return Err("Echo is executed by run".to_owned()),
            WorkerCommand::Open { socket } => self.open(socket)?,
            WorkerCommand::Blocks(blocks) => self.set_blocks(blocks),
            WorkerCommand::Warm { label, count, size } => self.warm(label, *count, *size)?,
            WorkerCommand::Reserve => self.reserve()?,
            WorkerCommand::Hold => self.hold()?,
            WorkerCommand::Drop => (self.reserved, self.held) = (Vec::new(), Vec::new()),
            WorkerCommand::Work { work, start_ns, stop_ns } => {
                return self.work(*work, *start_ns, *stop_ns);
            }
            WorkerCommand::Check => self.check()?,
        }
        Ok(WorkerReport::Done)
    }

    fn open(&mut self, socket: &Path) -> Result<(), String> {
        let client = Client::connect(ConnectOptions::new(socket));
        self.client = Some(client.map_err(|error| error.to_string())?);
        Ok(())
    }

    fn set_blocks(&mut self, blocks: &WorkerBlocks) {
        let WorkerBlocks { label, first, count, size, batch } = blocks;
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
            all_stored(&client.put(&puts(&[key], &bytes, size), CALL_OPTIONS))?;
        }
        client.clear();
        Ok(())
    }

    fn reserve(&mut self) -> Result<(), String> {
        let client = self.client()?;
        let one = |_: &BlockKey| reserve(client, self.size).map_err(|error| error.to_string());
        self.reserved = self.keys.iter().map(one).collect::<Result<_, _>>()?;
        Ok(())
    }

    fn hold(&mut self) -> Result<(), String> {
        let views =
            self.client()?.view(&self.keys, CALL_OPTIONS).into_iter().map(|view| match view {
                ViewOutcome::Hit { slab, .. } => {
                    slab.into_host().map_err(|_| "the node maps device memory".to_owned())
                }
                other => Err(format!("a view of a block that was put returned {other:?}")),
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

    fn work(
        &mut self,
        work: Work,
        start_ns: u64,
        stop_ns: Option<u64>,
    ) -> Result<WorkerReport, String> {
        if let (Work::Churn(seed), Some(stop_ns)) = (work, stop_ns) {
            return self.churn(seed, stop_ns);
        }
        // Make the buffer wrong, so that the check finds bytes that this work does not write.
        self.buffer.chunks_mut(4096).for_each(|page| page[0] ^= 0xff);
        sleep_until(start_ns);
        let began_ns = machine_ns();
        let (mut blocks, mut hits) = (0, 0);
        loop {
            let (more, found) = self.pass(work)?;
            blocks += more;
            hits += found;
            let ended_ns = machine_ns();
            if stop_ns.is_none_or(|stop_ns| ended_ns >= stop_ns) {
                return Ok(WorkerReport::Span { began_ns, ended_ns, blocks, hits });
            }
        }
    }

    fn pass(&mut self, work: Work) -> PassResult {
        let batch_bytes = self.batch * self.size;
        match work {
            Work::CopyIn => Ok(self.copy_in(<[u8]>::copy_from_slice)),
            Work::StreamIn => Ok(self.copy_in(copy_in)),
            Work::CopyOut => Ok(self.copy_out(<[u8]>::copy_from_slice)),
            Work::StreamOut => Ok(self.copy_out(|to, from| copy_out(to, from, batch_bytes))),
            Work::Put => self.put(),
            Work::Get => self.get(),
            Work::Churn(_) => Err("a churn needs a stop time".to_owned()),
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

    fn put(&self) -> PassResult {
        let client = self.client()?;
        let pieces = self.source.chunks(self.batch * self.size);
        for (keys, bytes) in self.keys.chunks(self.batch).zip(pieces) {
            all_stored(&client.put(&puts(keys, bytes, self.size), CALL_OPTIONS))?;
        }
        Ok((self.keys.len() as u64, 0))
    }

    fn get(&mut self) -> PassResult {
        let client = self.client.as_ref().ok_or("the worker is not connected")?;
        let mut buffers: Vec<&mut [u8]> = self.buffer.chunks_exact_mut(self.size).collect();
        let pieces = buffers.chunks_mut(self.batch);
        for (keys, buffers) in self.keys.chunks(self.batch).zip(pieces) {
            let outcomes = client.get(keys, buffers, CALL_OPTIONS);
            let is_miss = |outcome: &&GetOutcome| !matches!(outcome, GetOutcome::Hit { .. });
            if let Some(bad) = outcomes.iter().find(is_miss) {
                return Err(format!("a get returned {bad:?}"));
            }
        }
        Ok((self.keys.len() as u64, self.keys.len() as u64))
    }

    /// Random puts, gets and deletes until the stop time. Every byte of a get is checked.
    fn churn(&self, seed: u64, stop_ns: u64) -> Result<WorkerReport, String> {
        let client = self.client()?;
        let (mut random, keys) = (SplitMix64(seed), keys("churn", CHURN_KEYS));
        let (mut blocks, mut hits, began_ns) = (0, 0, machine_ns());
        let mut draw = || usize::try_from(random.next_u64() >> 33).unwrap_or(0);
        let mut bytes = vec![0; CHURN_BATCH * churn_bytes(CHURN_SIZES - 1)];
        while machine_ns() < stop_ns {
            let first = draw() % (CHURN_KEYS - CHURN_BATCH);
            let chosen = &keys[first..first + CHURN_BATCH];
            let lengths: Vec<usize> = (first..first + CHURN_BATCH).map(churn_bytes).collect();
            let mut remaining = bytes.as_mut_slice();
            let mut pieces = Vec::with_capacity(CHURN_BATCH);
            for length in &lengths {
                let (piece, tail) = remaining.split_at_mut(*length);
                pieces.push(piece);
                remaining = tail;
            }
            // 5 of 16 calls put, 1 deletes, 10 get.
            match draw() % 16 {
                0..5 => put_some(client, chosen, &mut pieces),
                5 => drop(client.delete(chosen)),
                _ => hits += get_some(client, chosen, &mut pieces)?,
            }
            blocks += CHURN_BATCH as u64;
        }
        Ok(WorkerReport::Span { began_ns, ended_ns: machine_ns(), blocks, hits })
    }
}

/// Puts blocks. Outcomes do not matter, because a full or busy node may decline; gets check bytes.
fn put_some(client: &Client, keys: &[BlockKey], pieces: &mut [&mut [u8]]) {
    keys.iter().zip(&mut *pieces).for_each(|(key, piece)| payload::fill(key, piece));
    let puts: Vec<Put<'_>> =
        keys.iter().zip(&*pieces).map(|(key, piece)| Put::new(*key, piece)).collect();
    drop(client.put(&puts, CALL_OPTIONS));
}

/// Gets blocks and checks their bytes. Returns the number of hits.
fn get_some(client: &Client, keys: &[BlockKey], pieces: &mut [&mut [u8]]) -> Result<u64, String> {
    let mut hits = 0;
    let outcomes = client.get(keys, pieces, CALL_OPTIONS);
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

/// The size of a block of a churn. It depends only on its number, so that all workers know it.
fn churn_bytes(number: usize) -> usize {
    CHURN_BYTES_MIN << (number % CHURN_SIZES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports(commands: &[WorkerCommand]) -> Vec<WorkerReport> {
        let lines = commands.iter().map(|command| serde_json::to_string(command).unwrap() + "\n");
        let mut reports = Vec::new();
        run(lines.collect::<String>().as_bytes(), &mut reports).unwrap();
        let reports = String::from_utf8(reports).unwrap();
        reports.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn a_failed_command_is_reported_and_the_worker_continues() {
        let label = "x".to_owned();
        let blocks = WorkerBlocks { label, first: 1, count: 2, size: 4096, batch: 1 };
        let work = |work| WorkerCommand::Work { work, start_ns: 0, stop_ns: None };
        let commands = [
            work(Work::Put),
            WorkerCommand::Open { socket: "/no/such/socket".into() },
            WorkerCommand::Blocks(blocks),
            work(Work::CopyIn),
            work(Work::Churn(1)),
        ];
        let reports = reports(&commands);
        assert_eq!(reports.len(), commands.len());
        let failed = |at: usize| matches!(reports[at], WorkerReport::Failed(_));
        assert!(failed(0) && failed(1) && failed(4), "{reports:?}");
        assert_eq!(reports[2], WorkerReport::Done);
        assert!(matches!(reports[3], WorkerReport::Span { blocks: 0, .. }), "no slab is reserved");
    }

    #[test]
    fn bytes_that_were_not_read_fail_the_check() {
        let mut worker = WorkerState::default();
        let label = "x".to_owned();
        let blocks = WorkerBlocks { label, first: 0, count: 2, size: 8192, batch: 1 };
        worker.set_blocks(&blocks);
        assert!(worker.check().is_err_and(|why| why.contains("WRONG BYTE")));
        worker.buffer.clone_from(&worker.source);
        assert_eq!(worker.check(), Ok(()));
        worker.work(Work::CopyOut, 0, None).unwrap();
        assert!(worker.check().is_err(), "no slab was copied, so the old bytes must fail");
    }

    #[test]
    fn the_buffer_of_a_churn_fits_its_largest_block() {
        let most = (0..CHURN_KEYS).map(churn_bytes).max();
        assert_eq!(most, Some(churn_bytes(CHURN_SIZES - 1)));
    }
}
