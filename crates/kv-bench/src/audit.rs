//! The blocks that were stored last, read again after the window: a store that loses its tail would
//! not be found otherwise, as no request reads them.

use std::time::Duration;

use cascade_replay::payload;
use cascade_runtime::Clock;

use crate::backend::{Backend, Read};
use crate::measurements::Measurements;
use crate::plan::Workload;

/// No further block is read after this time.
const TIME_MAX: Duration = Duration::from_secs(10);

/// Reads the blocks that were stored last, without counting bytes and latencies.
pub(crate) fn audit(
    backend: &dyn Backend,
    workload: &Workload,
    figures: &mut Measurements,
    verifies: bool,
    clock: &dyn Clock,
) {
    let keys = std::mem::take(&mut figures.last_stored).keys;
    let began = clock.monotonic();
    // The last one first: a tail is lost from its end.
    for key in keys.iter().rev() {
        if clock.monotonic().saturating_sub(began) > TIME_MAX {
            return;
        }
        figures.audit.blocks += 1;
        match backend.read(std::slice::from_ref(key)).into_iter().next() {
            Some(Read::Hit { held, tier }) if verifies => {
                let checked = payload::check(key, held.bytes(), workload.model.block_bytes);
                if let Err(wrong) = checked {
                    let (name, offset) = (tier.name(), wrong.offset);
                    figures.wrong(|| {
                        format!("block {key} from {name}, after the window: byte {offset} differs")
                    });
                }
            }
            Some(Read::Hit { .. }) => {}
            Some(Read::Failed(reason)) => figures.failed(&reason),
            Some(Read::Miss) | None => figures.audit.missing += 1,
        }
    }
}
