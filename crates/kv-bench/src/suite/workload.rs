//! The names of the eleven workloads, what each shows, and which options it has.

use crate::KvBenchError;

/// A workload of the suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SuiteWorkload {
    /// A simulated GPU, and little DRAM.
    GpuOnly,
    /// Much DRAM.
    CpuOnly,
    /// Little DRAM.
    StorageOnly,
    /// A simulated GPU, and much DRAM.
    GpuCpu,
    /// Many users on some DRAM.
    CpuStorage,
    /// Many users on a simulated GPU and some DRAM.
    GpuCpuStorage,
    /// Many users on little DRAM.
    StorageSaturation,
    /// The usual users on much DRAM.
    Production,
    /// Looks for the number of users.
    Autoscale,
    /// Looks for the highest rate.
    CapacityAutoscale,
    /// The workloads of a submission.
    Submission,
}

/// What the length of a workload depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// The comparison of tiers.
    Tier,
    /// Storage saturation.
    Saturation,
    /// Production.
    Production,
    /// Both kinds of autoscaling.
    Autoscale,
    /// The workloads of a submission.
    Submission,
}

impl SuiteWorkload {
    /// All of them, in the order of a run.
    pub const ALL: [Self; 11] = [
        Self::GpuOnly,
        Self::CpuOnly,
        Self::StorageOnly,
        Self::GpuCpu,
        Self::CpuStorage,
        Self::GpuCpuStorage,
        Self::StorageSaturation,
        Self::Production,
        Self::Autoscale,
        Self::CapacityAutoscale,
        Self::Submission,
    ];

    /// The name of the original's wrapper.
    pub fn name(self) -> &'static str {
        match self {
            Self::GpuOnly => "gpu-only",
            Self::CpuOnly => "cpu-only",
            Self::StorageOnly => "storage-only",
            Self::GpuCpu => "gpu-cpu",
            Self::CpuStorage => "cpu-storage",
            Self::GpuCpuStorage => "gpu-cpu-storage",
            Self::StorageSaturation => "storage-saturation",
            Self::Production => "production",
            Self::Autoscale => "autoscale",
            Self::CapacityAutoscale => "capacity-autoscale",
            Self::Submission => "mlperf_submission",
        }
    }

    /// Other names that the wrapper accepts. `-` stands for `_` and `+`, too.
    fn short_names(self) -> &'static [&'static str] {
        match self {
            Self::GpuOnly => &["gpu"],
            Self::CpuOnly => &["cpu"],
            Self::StorageOnly => &["storage"],
            Self::GpuCpuStorage => &["three-tier"],
            Self::StorageSaturation => &["saturation"],
            Self::Production => &["realistic"],
            Self::Autoscale => &["autoscaling", "qos-autoscale"],
            Self::CapacityAutoscale => &["capacity"],
            Self::Submission => &["mlperf"],
            Self::GpuCpu | Self::CpuStorage => &[],
        }
    }

    /// What it shows.
    pub fn summary(self) -> &'static str {
        match self {
            Self::GpuOnly => "KV in simulated GPU memory, as far as it fits",
            Self::CpuOnly => "KV in half of the memory as DRAM, as far as it fits",
            Self::StorageOnly => "KV on the disk, behind little DRAM",
            Self::GpuCpu => "KV in simulated GPU memory and DRAM, as far as it fits",
            Self::CpuStorage => "many users on little DRAM and the disk",
            Self::GpuCpuStorage => "many users on all three tiers",
            Self::StorageSaturation => "many users on the disk, to see where it saturates",
            Self::Production => "a usual load on much DRAM and the disk",
            Self::Autoscale => "how many users the storage carries within its latency limits",
            Self::CapacityAutoscale => "the highest rate of the storage, whatever the latency",
            Self::Submission => "the three workloads of an MLPerf submission, one trial each",
        }
    }

    /// The workload of this name, in any spelling of the wrapper.
    fn by_name(name: &str) -> Option<Self> {
        let squeezed = name.to_ascii_lowercase().replace(' ', "").replace(['_', '+'], "-");
        Self::ALL.into_iter().find(|workload| {
            let names = [workload.name()].into_iter().chain(workload.short_names().iter().copied());
            names.into_iter().any(|known| known.replace('_', "-") == squeezed)
        })
    }

    /// What its length depends on.
    pub fn length(self) -> Length {
        match self {
            Self::StorageSaturation => Length::Saturation,
            Self::Production => Length::Production,
            Self::Autoscale | Self::CapacityAutoscale => Length::Autoscale,
            Self::Submission => Length::Submission,
            _ => Length::Tier,
        }
    }

    /// Whether it has the usual number of users.
    pub fn has_usual_users(self) -> bool {
        use SuiteWorkload as It;
        matches!(self, It::GpuOnly | It::CpuOnly | It::StorageOnly | It::GpuCpu | It::Production)
    }

    /// Whether it has the number of users of high load.
    pub fn has_many_users(self) -> bool {
        matches!(self, Self::CpuStorage | Self::GpuCpuStorage | Self::StorageSaturation)
    }

    /// Whether it needs a GPU tier.
    pub fn needs_gpu(self) -> bool {
        matches!(self, Self::GpuOnly | Self::GpuCpu | Self::GpuCpuStorage)
    }

    /// Whether it has a GPU tier if `--gpu-mem-gb` gives one.
    pub fn takes_gpu(self) -> bool {
        self.needs_gpu() || matches!(self, Self::Production | Self::Autoscale)
    }

    /// Whether the model and documents can be chosen.
    pub fn is_free(self) -> bool {
        !matches!(self, Self::CapacityAutoscale | Self::Submission)
    }

    /// Whether it changes the number of users itself.
    pub fn is_scaled(self) -> bool {
        matches!(self, Self::Autoscale | Self::CapacityAutoscale)
    }
}

/// The workloads of a list with commas, each once, in the order of a run. `all` are all of them.
///
/// # Errors
/// If a name is unknown, or the list is empty.
pub fn parse_list(list: &str) -> Result<Vec<SuiteWorkload>, KvBenchError> {
    let mut chosen = Vec::new();
    for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        if name.eq_ignore_ascii_case("all") {
            chosen.extend(SuiteWorkload::ALL);
            continue;
        }
        let found = SuiteWorkload::by_name(name);
        chosen.push(found.ok_or_else(|| unknown(format!("there is no workload {name:?}")))?);
    }
    chosen.sort_unstable();
    chosen.dedup();
    if chosen.is_empty() {
        return Err(unknown(format!("--workloads {list:?} names none")));
    }
    Ok(chosen)
}

fn unknown(what: String) -> KvBenchError {
    let names = SuiteWorkload::ALL.map(SuiteWorkload::name).join(", ");
    KvBenchError::usage(what, format!("give names with commas between them, or all: {names}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_workload_has_the_spellings_of_the_wrapper() {
        for workload in SuiteWorkload::ALL {
            let name = workload.name();
            for spelling in [name.replace('_', "-"), name.replace('-', "_"), name.to_uppercase()] {
                assert_eq!(parse_list(&spelling).unwrap(), [workload], "{spelling}");
            }
        }
        let short = "gpu, cpu,storage,GPU+CPU,cpu+storage,three-tier,saturation,realistic,\
                     qos-autoscale,capacity,mlperf";
        assert_eq!(parse_list(short).unwrap(), SuiteWorkload::ALL);
        assert_eq!(parse_list("gpu + cpu + storage").unwrap(), [SuiteWorkload::GpuCpuStorage]);
    }

    #[test]
    fn a_list_has_each_workload_once_in_the_order_of_a_run() {
        assert_eq!(parse_list("all").unwrap(), SuiteWorkload::ALL);
        let chosen = parse_list("production,cpu_only,cpu-only,").unwrap();
        assert_eq!(chosen, [SuiteWorkload::CpuOnly, SuiteWorkload::Production]);
        for wrong in ["", " , ", "tpu-only", "cpu-only,x"] {
            let refused = parse_list(wrong).unwrap_err().to_string();
            assert!(refused.contains("gpu-only, cpu-only"), "{refused}");
        }
    }
}
