//! What to simulate, and the worlds that this is.

use std::time::Duration;

use cascade_runtime::Plant;
use cascade_runtime::simulated::Random;

use crate::report::WorldReport;
use crate::world::{self, WorldPlan};

/// Operations of one world.
pub const WORLD_OPERATIONS: u64 = 20_000;
/// The first stream of a simulation's seed; each world has one.
const WORLD_STREAMS: u64 = 1 << 32;
/// What to simulate.
#[derive(Debug, Clone, Copy)]
pub struct SimOptions {
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

impl SimOptions {
    /// What a world of this simulation is; `None` for a world that it does not have.
    pub(crate) fn plan(&self, number: u64) -> Option<WorldPlan> {
        let left = match self.length {
            Length::Operations(all) => all.saturating_sub(number.saturating_mul(WORLD_OPERATIONS)),
            Length::Time(_) => WORLD_OPERATIONS,
        };
        let is_ours = self.world.is_none_or(|world| world == number);
        (left > 0 && is_ours).then(|| WorldPlan {
            seed: Random::new(self.seed, WORLD_STREAMS.wrapping_add(number)).next_u64(),
            operations: left.min(WORLD_OPERATIONS),
            plant: self.plant,
        })
    }

    /// Runs a world of this simulation, here; `None` for a world that it does not have.
    pub(crate) fn run_world(&self, number: u64) -> Option<WorldReport> {
        let plan = self.plan(number)?;
        let result = world::run(plan);
        let is_different = self.twice && {
            // Other addresses: nothing may depend on them.
            let shift = vec![0_u8; 1 << (plan.seed % 20)];
            let again = world::run(plan);
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
            Length::Time(_) => (number + 1) * WORLD_OPERATIONS,
        };
        let twice = if is_different { " --twice" } else { "" };
        let plant = self.plant.map_or_else(String::new, |plant| format!(" --plant {plant}"));
        let seed = self.seed;
        let world = format!("--operations {operations} --world {number}{twice}{plant}");
        format!("cascade sim --nodes 1 --seed {seed} {world}")
    }
}
