//! `cascade bench transport`: the options.

use std::path::{Path, PathBuf};

use cascade_bench::Bench;
use cascade_bench::transport::{self, TransportOptions};
use clap::Args;

use crate::bench::Output;
use crate::{Failure, Screen};

/// The measurements of the transport.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench transport
      All rows: two processes on this host, 2.5 GiB of memory, some minutes.
  cascade bench transport --only tcp/write/ --json transport.json
      Only writes over TCP.
  cascade bench transport --peers .cache/transport-peers/bin/python
      Also Mooncake and NIXL, and how many times faster ours are: half an hour.
  cascade bench transport --short
      Check that the benchmark works. Its values mean nothing.

A row is the median rate of batches of 1,538 blocks (fewer of long blocks), in random order, between
regions of 512 MiB, larger than the caches. Batches follow each other: each is confirmed before the
next one of its thread. Afterwards each block that was moved is compared with its source.

The limit of tcp/ is one plain stream of large messages on the same loopback, that of shm/ copies of
the same blocks inside one process; both are measured before each row. For a network without other
traffic: unshare --net --map-root-user sh -c 'ip link set lo up; cascade bench transport'

In JSON, each row has backend, block_bytes, batch, threads, gbps, limit_gbps, share, peer, verified
and cpu_ns_per_block.")]
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
    let output = Output::new(args.json.as_deref(), args.only.as_deref());
    let options = TransportOptions { is_short: args.short };
    let mut failures = vec![];
    let code = output.measure(None, screen, |deliver| {
        let (directory, only) = (PathBuf::from("."), args.only.clone());
        let mut bench = Bench { is_full: false, directory, only, deliver };
        failures = transport::run(&mut bench, options, args.peers.as_deref())?;
        Ok(())
    })?;
    for failure in failures {
        screen.notice(format!("not measured: {failure}"))?;
    }
    Ok(code)
}
