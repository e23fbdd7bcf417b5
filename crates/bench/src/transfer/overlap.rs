//! Simulated compute: what a prefill engine does with a layer before it can be sent.

use std::time::Duration;

use cascade_runtime::{sleep, thread_cpu_time};

use crate::node::machine_ns;

/// Milliseconds of one layer.
pub(super) const LAYER_MS: f64 = 5.0;
const LAYER: Duration = Duration::from_millis(5);

/// How the computation of a layer is simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compute {
    /// The thread sleeps, as one that waits for a GPU.
    Sleep,
    /// The thread uses as much processor time, as a computation on the host does.
    Spin,
}

impl Compute {
    pub(super) const ALL: [Self; 2] = [Self::Sleep, Self::Spin];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Sleep => "sleep",
            Self::Spin => "spin",
        }
    }

    /// Computes one layer.
    pub(super) fn layer(self) {
        match self {
            Self::Sleep => sleep(LAYER),
            Self::Spin => {
                let end = thread_cpu_time() + LAYER;
                while thread_cpu_time() < end {
                    std::hint::spin_loop();
                }
            }
        }
    }

    /// How long so many layers take when nothing is sent.
    pub(super) fn alone_ns(self, layers: u64) -> u64 {
        let start = machine_ns();
        for _ in 0..layers {
            self.layer();
        }
        machine_ns() - start
    }
}
