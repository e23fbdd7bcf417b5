//! What to simulate, and the worlds that this is.

use std::time::Duration;

use cascade_runtime::Plant;
use cascade_runtime::simulated::Random;

use crate::report::WorldReport;
use crate::transport;
use crate::world::{self, WorldPlan, WorldResult};

/// Operations of one world of stores.
pub const WORLD_OPERATIONS: u64 = 20_000;
/// Operations of one world of the transport.
const TRANSPORT_OPERATIONS: u64 = 2_000;
/// The first stream of a simulation's seed; each world has one.
const WORLD_STREAMS: u64 = 1 << 32;

/// What a world consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A store, its callers and its disk.
    Store,
    /// Endpoints of the transport on a network.
    Transport,
}

/// What to simulate.
#[derive(Debug, Clone, Copy)]
pub struct SimOptions {
    /// What is simulated.
    pub subject: Subject,
    /// Decides everything.
    pub seed: u64,
    /// When to stop.
    pub length: Length,
    /// Run only this world of the simulation.
    pub world: Option<u64>,
    /// Worlds at a time.
    pub jobs: usize,
    /// Run each world twice and compare.
    pub twice: bool,
    /// A bug to plant.
    pub plant: Option<Plant>,
}

/// When a simulation stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// After so many operations, exactly. The last world is shorter than the others.
    Operations(u64),
    /// When this real time has passed and all worlds that have begun are over.
    Time(Duration),
}

impl Subject {
    /// Operations of one world.
    pub fn world_operations(self) -> u64 {
        match self {
            Self::Store => WORLD_OPERATIONS,
            Self::Transport => TRANSPORT_OPERATIONS,
        }
    }

    fn run(self, plan: WorldPlan) -> WorldResult {
        match self {
            Self::Store => world::run(plan),
            Self::Transport => transport::run(plan),
        }
    }
}

impl SimOptions {
    /// What a world of this simulation is; `None` for a world that it does not have.
    pub(crate) fn plan(&self, number: u64) -> Option<WorldPlan> {
        let each = self.subject.world_operations();
        let left = match self.length {
            Length::Operations(all) => all.saturating_sub(number.saturating_mul(each)),
            Length::Time(_) => each,
        };
        let is_ours = self.world.is_none_or(|world| world == number);
        (left > 0 && is_ours).then(|| WorldPlan {
            seed: Random::new(self.seed, WORLD_STREAMS.wrapping_add(number)).next_u64(),
            operations: left.min(each),
            plant: self.plant,
        })
    }

    /// Runs a world of this simulation, here; `None` for a world that it does not have.
    pub(crate) fn run_world(&self, number: u64) -> Option<WorldReport> {
        let plan = self.plan(number)?;
        let result = self.subject.run(plan);
        let is_different = self.twice && {
            // Other addresses: nothing may depend on them.
            let shift = vec![0_u8; 1 << (plan.seed % 20)];
            let again = self.subject.run(plan);
            drop(shift);
            again.report != result.report || again.findings.listed != result.findings.listed
        };
        Some(WorldReport::new(number, result, is_different))
    }

    /// The command that runs one world again.
    pub(crate) fn repeat(&self, number: u64, is_different: bool) -> String {
        let operations = match self.length {
            Length::Operations(operations) => operations,
            // Whole worlds up to this one.
            Length::Time(_) => (number + 1) * self.subject.world_operations(),
        };
        let twice = if is_different { " --twice" } else { "" };
        let plant = self.plant.map_or_else(String::new, |plant| format!(" --plant {plant}"));
        let seed = self.seed;
        let world = format!("--operations {operations} --world {number}{twice}{plant}");
        let subject = match self.subject {
            Subject::Store => "--nodes 1",
            Subject::Transport => "--transport",
        };
        format!("cascade sim {subject} --seed {seed} {world}")
    }
}
