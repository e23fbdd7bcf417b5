//! `cascade bench transport`: the options.

use std::path::{Path, PathBuf};

use cascade_bench::Bench;
use cascade_bench::transport::{self, Notes, TRANSPORT_COLUMNS, TransportOptions};
use clap::Args;

use crate::bench::Output;
use crate::{Failure, Screen};

/// The measurements of the transport.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench transport
      All rows: two processes on this host, 4 GiB of memory, some minutes.
  cascade bench transport --only tcp/write/ --json transport.json
      Only writes over TCP.
  cascade bench transport --peers .cache/transport-peers/bin/python
      Also Mooncake and NIXL, and how many times faster ours are: half an hour.
  cascade bench transport --short
      Check that the benchmark works. Its values mean nothing.

A row is the median rate of batches of 1,538 blocks (fewer of long blocks), in random order, between
regions of 512 MiB, larger than the caches. A sample is 32 MiB or more, in batches that follow each
other: each is confirmed before the next one of its thread. Afterwards each block that was moved is
compared with its source.

The limit of tcp/ and tls/ is one plain stream on the same loopback with the fastest of eight
settings, that of shm/ copies of such blocks inside one process by as many threads.
tcp/checksummed-stream and tls/rustls-stream are the plain stream with checksums, and over
connections of rustls. For a network without other traffic: unshare --net --map-root-user sh -c 'ip
link set lo up; cascade bench transport'

CPU is the processor time of both processes for a block. System calls are counted by strace, in a
batch that is not timed; calls/ has those of 1,538 blocks of 1 KiB beside their target. Copies are
those of each byte, by construction. With --peers a table at the end has a line a length.

In JSON, each row has backend, block_bytes, batch, threads, gbps, limit_gbps, share, peer, verified,
cpu_ns_per_block, system_calls_per_batch and copies_per_byte; one of tls/ also has record_layer,
kernel or userspace.")]
pub(crate) struct TransportArgs {
    /// Write the figures as JSON to FILE; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure only rows whose name contains TEXT.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Also measure Mooncake and NIXL, with a Python that has their packages, such as that of `make
    /// transport-peers`
    #[arg(long, value_name = "PYTHON")]
    peers: Option<PathBuf>,
    /// Only check that everything works: two block lengths, few batches.
    #[arg(long)]
    short: bool,
}

impl TransportArgs {
    pub(super) fn json(&self) -> Option<&Path> {
        self.json.as_deref()
    }
}

pub(super) fn run(args: &TransportArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let output = Output {
        columns: TRANSPORT_COLUMNS,
        ..Output::new(args.json.as_deref(), args.only.as_deref())
    };
    let options = TransportOptions { is_short: args.short };
    let mut notes = Notes::default();
    let code = output.measure(None, screen, |deliver| {
        let (directory, only) = (PathBuf::from("."), args.only.clone());
        let mut bench = Bench { is_full: false, directory, only, deliver };
        notes = transport::run(&mut bench, options, args.peers.as_deref())?;
        Ok(())
    })?;
    let is_json_on_screen = args.json.as_deref() == Some(Path::new("-"));
    for line in notes.summary.iter().filter(|_| !is_json_on_screen) {
        screen.line(line)?;
    }
    for failure in notes.failures {
        screen.notice(format!("not measured: {failure}"))?;
    }
    Ok(code)
}
