//! `cascade bench transfer`: the options.

use std::path::{Path, PathBuf};

use cascade_bench::Bench;
use cascade_bench::transfer::{self, TRANSFER_COLUMNS, TransferOptions};
use clap::Args;

use crate::bench::Output;
use crate::{Failure, Screen};

/// The measurements of a transfer from prefill to decode.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cascade bench transfer
      All rows: two processes on this host, 8 GiB of memory, some minutes.
  cascade bench transfer --only llama-3.1-8b --json transfer.json
      Only the smaller model: 4 GiB of memory.
  cascade bench transfer --only overlap/
      Only what simulated compute hides.
  cascade bench transfer --short
      Check that the benchmark works. Its values mean nothing.

A prompt of 8,192 tokens with the geometry of a model: a region of keys and one of values for each
layer, pages of 16 tokens, at random places in both processes, larger than the caches. After each
round every page of the receiver is compared, also those that nothing was written to.

push/ writes, layer by layer, with a notice for each; pull/ reads. Rates are those of the last
layer's arrival. first and last are the times until the receiver has those layers, and CPU is the
processor time of both processes for the keys and values of one block of one layer. The limit of
tcp/ is one plain stream on the same loopback, that of shm/ copies of such pages inside one process.

overlap/ pushes 2,048 tokens while later layers are computed, 5 ms each. The computation is
simulated: sleep leaves the processors free, as a GPU does; spin occupies one. The figure is the
share of the transfer's time that is hidden.

remote-local/ is the time to read the prompt from the other process over that of copying it inside
this one. There is a target where the limit reaches it.

In JSON, each row has backend, model, direction, layers, tokens, blocks, gbps, limit_gbps, share,
first_layer_ms, last_layer_ms, overlap, times_local, verified and cpu_ns_per_block.")]
pub(crate) struct TransferArgs {
    /// Write the figures as JSON to FILE; - is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure only rows whose name contains TEXT.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Only check that everything works: four layers, 256 tokens.
    #[arg(long)]
    short: bool,
}

impl TransferArgs {
    pub(super) fn json(&self) -> Option<&Path> {
        self.json.as_deref()
    }
}

pub(super) fn run(args: &TransferArgs, screen: &mut Screen) -> Result<i32, Failure> {
    let output = Output {
        columns: TRANSFER_COLUMNS,
        ..Output::new(args.json.as_deref(), args.only.as_deref())
    };
    screen.notice("allocating and filling the pages of a model takes some seconds")?;
    output.measure(None, screen, |deliver| {
        let (directory, only) = (PathBuf::from("."), args.only.clone());
        let mut bench = Bench { is_full: false, directory, only, deliver };
        transfer::run(&mut bench, TransferOptions { is_short: args.short })
    })
}
