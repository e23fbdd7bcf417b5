//! Which ranks this process runs: all of them, or the one that srun or mpirun started it as.

use cascade_kv_bench::KvBenchError;

/// Variables of a launcher: the rank, the number of ranks, and the ranks of this host.
const LAUNCHERS: [(&str, &str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
];

/// The ranks of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ranks {
    /// All of them.
    pub(super) total: u32,
    /// Those of one host.
    pub(super) of_host: u32,
    /// The only one that this process runs, if a launcher started it.
    pub(super) own: Option<u32>,
}

impl Ranks {
    /// The ranks of this process. `given` is --ranks.
    pub(super) fn of_process(given: Option<u32>) -> Result<Self, KvBenchError> {
        Self::new(given, &variable)
    }

    fn new(
        given: Option<u32>,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, KvBenchError> {
        let number = |name: &str| -> Option<u32> {
            let text = variable(name)?;
            // SLURM writes `4(x2)` for two hosts with four each.
            let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
            text[..end].parse().ok()
        };
        let launched = LAUNCHERS.iter().find_map(|(rank, total, of_host)| {
            let (own, total) = (number(rank)?, number(total)?);
            (total > 1).then(|| (*rank, own, total, number(of_host).unwrap_or(1).clamp(1, total)))
        });
        match (launched, given) {
            (None, _) => {
                let total = given.unwrap_or(1);
                Ok(Self { total, of_host: total, own: None })
            }
            // A batch script has variables of SLURM, too, and starts its ranks itself.
            (Some(("SLURM_PROCID", ..)), Some(total))
                if number("SLURM_STEP_NUM_TASKS").is_none_or(|tasks| tasks == 1) =>
            {
                Ok(Self { total, of_host: total, own: None })
            }
            (Some((name, own, total, _)), Some(given)) => Err(KvBenchError::usage(
                format!("--ranks {given}, and {name} says that this is rank {own} of {total}"),
                "leave out --ranks under srun or mpirun, or start the command without them",
            )),
            (Some((name, own, total, _)), None) if own >= total => Err(KvBenchError::usage(
                format!("{name} is {own}, and there are {total} ranks"),
                "start the command with srun or mpirun, or give --ranks",
            )),
            (Some((_, own, total, of_host)), None) => Ok(Self { total, of_host, own: Some(own) }),
        }
    }

    /// Hosts, if all have the same number of ranks.
    pub(super) fn hosts(self) -> u32 {
        self.total.div_ceil(self.of_host)
    }

    /// The ranks that this process runs.
    pub(super) fn here(self) -> std::ops::Range<u32> {
        match self.own {
            Some(own) => own..own + 1,
            None => 0..self.total,
        }
    }

    /// Whether this process writes the summary.
    pub(super) fn is_first(self) -> bool {
        self.own.unwrap_or(0) == 0
    }
}

#[expect(clippy::disallowed_methods, reason = "srun and mpirun tell a process its rank this way")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(given: Option<u32>, variables: &[(&str, &str)]) -> Result<Ranks, String> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Ranks::new(given, &variable).map_err(|error| error.to_string())
    }

    #[test]
    fn a_process_takes_its_rank_from_its_launcher() {
        let alone = Ranks { total: 1, of_host: 1, own: None };
        assert_eq!(ranks(None, &[]), Ok(alone));
        assert_eq!(ranks(Some(4), &[]), Ok(Ranks { total: 4, of_host: 4, own: None }));
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
        ];
        let found = ranks(None, &slurm).unwrap();
        assert_eq!(found, Ranks { total: 8, of_host: 4, own: Some(3) });
        assert_eq!((found.hosts(), found.here(), found.is_first()), (2, 3..4, false));
        let mpi = [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("SLURM_PROCID", "1")];
        assert_eq!(ranks(None, &mpi).unwrap().own, Some(0));
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
        assert_eq!(ranks(None, &open_mpi).unwrap().own, Some(1));
        let one = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")];
        assert_eq!(ranks(None, &one), Ok(alone));
    }

    #[test]
    fn contradictions_are_refused_and_a_batch_script_starts_its_own_ranks() {
        let step = [("SLURM_PROCID", "3"), ("SLURM_STEP_NUM_TASKS", "8")];
        assert!(ranks(Some(2), &step).unwrap_err().contains("rank 3 of 8"));
        let script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")];
        assert_eq!(ranks(Some(2), &script).unwrap().total, 2);
        let wrong = [("PMI_RANK", "2"), ("PMI_SIZE", "2")];
        assert!(ranks(None, &wrong).unwrap_err().contains("PMI_RANK is 2"));
    }
}
