//! The runs of the suite: sizes by what the machine has, and the command line of each run.

use crate::submission::OPTIONS;
use crate::suite::workload::{Length, SuiteWorkload};

/// The usual number of users.
const USERS: u32 = 50;
/// Users of high load: this many for each GiB of memory, within these bounds.
const USERS_PER_GIB: f64 = 10.0;
const MANY_USERS: (u32, u32) = (50, 300);
/// Users at the start of autoscaling.
const SCALED_USERS: u32 = 20;
/// The workload that looks for the highest rate: its model and its users at the start.
const CAPACITY: (&str, u32) = ("llama3.1-70b-instruct", 10);
/// GiB of DRAM that are hardly in the way of the disk.
const LITTLE_GIB: f64 = 4.0;
/// Most GiB of a simulated GPU, unless it is given.
const GPU_GIB: f64 = 16.0;

/// Seconds of each kind of workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// Those that compare tiers.
    pub tier: u64,
    /// Storage saturation.
    pub saturation: u64,
    /// Production.
    pub production: u64,
    /// Both kinds of autoscaling.
    pub autoscale: u64,
    /// Each workload of a submission.
    pub submission: u64,
}

impl Default for Lengths {
    /// Those of the original's wrapper.
    fn default() -> Self {
        Self { tier: 120, saturation: 180, production: 180, autoscale: 300, submission: 300 }
    }
}

impl Lengths {
    fn of(&self, length: Length) -> u64 {
        match length {
            Length::Tier => self.tier,
            Length::Saturation => self.saturation,
            Length::Production => self.production,
            Length::Autoscale => self.autoscale,
            Length::Submission => self.submission,
        }
    }
}

/// What the runs depend on.
#[derive(Debug, Clone)]
pub struct SuiteOptions {
    /// The model of the workloads that have no own one.
    pub model: String,
    /// Ranks that share the KV of a token; a run stores the part of one.
    pub ranks: u32,
    /// GiB of memory that tiers are sized by.
    pub memory_gib: f64,
    /// GiB of the simulated GPU, if they are given.
    pub gpu_gib: Option<f64>,
    /// The usual number of users, if it is given.
    pub users: Option<u32>,
    /// The number of users of high load, if it is given.
    pub many_users: Option<u32>,
    /// Documents that a tenth of the requests read, if any.
    pub documents: Option<u32>,
    /// Seconds of each kind of workload.
    pub lengths: Lengths,
    /// Whether all workloads run as the original stores and counts.
    pub is_compatible: bool,
    /// The seed of all runs.
    pub seed: u64,
}

/// One run of `cascade bench kv`.
#[derive(Debug, Clone, PartialEq)]
pub struct SuiteRun {
    /// What it belongs to.
    pub workload: SuiteWorkload,
    /// The workload, and which part of it.
    pub name: String,
    /// The result file, as the original's wrapper names it.
    pub file: &'static str,
    /// Length of the window.
    pub seconds: u64,
    /// Whether it stores and counts as the original does.
    pub is_compatible: bool,
    /// Users at the start.
    pub users: u32,
    /// GiB of the simulated GPU; 0: none.
    pub gpu_gib: f64,
    /// GiB of the DRAM tier; 0: none.
    pub cpu_gib: f64,
    /// The options of `cascade bench kv`, without directories.
    pub arguments: Vec<String>,
}

impl SuiteOptions {
    /// The usual number of users.
    pub fn usual_users(&self) -> u32 {
        self.users.unwrap_or(USERS)
    }

    /// Users of high load: at least the usual ones, unless they are given.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a product of sizes that are not negative; casts of floats saturate"
    )]
    pub fn high_users(&self) -> u32 {
        let (least, most) = MANY_USERS;
        let by_memory = (self.memory_gib * USERS_PER_GIB) as u32;
        let usual = by_memory.clamp(least, most).max(self.usual_users());
        self.many_users.unwrap_or(usual)
    }

    /// GiB of DRAM with which most KV fits.
    pub fn large_gib(&self) -> f64 {
        whole(self.memory_gib / 2.0)
    }

    /// GiB of DRAM with which most KV does not fit.
    pub fn small_gib(&self) -> f64 {
        whole(self.memory_gib / 8.0)
    }

    /// GiB of DRAM that are hardly in the way of the disk.
    fn little_gib(&self) -> f64 {
        self.large_gib().min(LITTLE_GIB)
    }

    /// GiB of the simulated GPU of workloads that need one.
    pub fn simulated_gpu_gib(&self) -> f64 {
        self.gpu_gib.unwrap_or_else(|| whole(self.memory_gib / 4.0).min(GPU_GIB))
    }

    /// The runs of these workloads.
    pub fn runs(&self, workloads: &[SuiteWorkload]) -> Vec<SuiteRun> {
        let of = |workload: &SuiteWorkload| match workload {
            SuiteWorkload::Submission => self.submissions(),
            SuiteWorkload::CapacityAutoscale => vec![self.capacity()],
            workload => vec![self.free(*workload)],
        };
        workloads.iter().flat_map(of).collect()
    }

    /// A workload whose model, users and memory can be chosen.
    fn free(&self, workload: SuiteWorkload) -> SuiteRun {
        let gpu_gib = if workload.needs_gpu() {
            self.simulated_gpu_gib()
        } else {
            self.gpu_gib.filter(|_| workload.takes_gpu()).unwrap_or(0.0)
        };
        let (little, small, large) = (self.little_gib(), self.small_gib(), self.large_gib());
        let (file, cpu_gib) = match workload {
            SuiteWorkload::GpuOnly => ("results_tier_gpu_only.json", little),
            SuiteWorkload::CpuOnly => ("results_tier_cpu_only.json", large),
            SuiteWorkload::GpuCpu => ("results_tier_gpu_cpu.json", large),
            SuiteWorkload::CpuStorage => ("results_tier_cpu_storage.json", small),
            SuiteWorkload::GpuCpuStorage => ("results_tier_gpu_cpu_storage.json", small),
            SuiteWorkload::StorageSaturation => ("results_stress_storage_saturation.json", little),
            SuiteWorkload::Production => ("results_realistic_production.json", large),
            SuiteWorkload::Autoscale => ("results_autoscaling_discovery.json", small),
            _ => ("results_tier_storage_only.json", little),
        };
        let users = match workload {
            SuiteWorkload::Autoscale => SCALED_USERS,
            workload if workload.has_many_users() => self.high_users(),
            _ => self.usual_users(),
        };
        let mut run = SuiteRun {
            workload,
            name: workload.name().to_owned(),
            file,
            seconds: self.lengths.of(workload.length()),
            is_compatible: self.is_compatible,
            users,
            gpu_gib,
            cpu_gib,
            arguments: Vec::new(),
        };
        run.set_arguments(&self.model, "realistic", self.seed, self.ranks);
        if workload == SuiteWorkload::Autoscale {
            let scaling = ["--enable-autoscaling", "--autoscaler-mode", "qos"];
            run.arguments.extend(scaling.map(str::to_owned));
            run.arguments.extend(["--target-saturation", "0.8"].map(str::to_owned));
        }
        if let Some(documents) = self.documents {
            run.arguments.extend(["--enable-rag", "--rag-num-docs"].map(str::to_owned));
            run.arguments.push(documents.to_string());
        }
        run
    }

    fn capacity(&self) -> SuiteRun {
        let (model, users) = CAPACITY;
        let workload = SuiteWorkload::CapacityAutoscale;
        let mut run = SuiteRun {
            workload,
            name: workload.name().to_owned(),
            file: "results_autoscaling_capacity.json",
            seconds: self.lengths.of(workload.length()),
            is_compatible: false,
            users,
            gpu_gib: 0.0,
            cpu_gib: self.little_gib(),
            arguments: Vec::new(),
        };
        run.set_arguments(model, "none", self.seed, 1);
        let scaling = ["--enable-autoscaling", "--autoscaler-mode", "capacity"];
        run.arguments.extend(scaling.map(str::to_owned));
        run
    }

    /// The workloads of the rules, as a submission stores and counts them.
    fn submissions(&self) -> Vec<SuiteRun> {
        let workload = SuiteWorkload::Submission;
        let files = [
            "mlperf_v3_stress_8b.json",
            "mlperf_v3_throughput_8b.json",
            "mlperf_v3_stress_70b.json",
        ];
        let run = |(option, file): (&crate::submission::SubmissionOption, &'static str)| {
            let mut run = SuiteRun {
                workload,
                name: format!("mlperf option {}", option.number),
                file,
                seconds: self.lengths.of(workload.length()),
                is_compatible: true,
                users: option.users,
                gpu_gib: 0.0,
                cpu_gib: f64::from(option.cpu_gib),
                arguments: Vec::new(),
            };
            run.set_arguments(option.model, "none", self.seed, 1);
            let allocations = option.allocations.to_string();
            run.arguments.extend(["--max-concurrent-allocs".to_owned(), allocations]);
            run
        };
        OPTIONS.iter().zip(files).map(run).collect()
    }
}

impl SuiteRun {
    fn set_arguments(&mut self, model: &str, generation: &str, seed: u64, ranks: u32) {
        let pairs = [
            ("--model", model.to_owned()),
            ("--num-users", self.users.to_string()),
            ("--duration", self.seconds.to_string()),
            // For each of as many GPUs as there are ranks.
            ("--gpu-mem-gb", (self.gpu_gib / f64::from(ranks)).to_string()),
            ("--cpu-mem-gb", self.cpu_gib.to_string()),
            ("--generation-mode", generation.to_owned()),
            ("--seed", seed.to_string()),
        ];
        let ranks = (ranks > 1).then(|| {
            let ranks = ranks.to_string();
            [("--num-gpus", ranks.clone()), ("--tensor-parallel", ranks)]
        });
        let mode = self.is_compatible.then(|| "--compatible".to_owned());
        let pairs = pairs
            .into_iter()
            .chain(ranks.into_iter().flatten())
            .flat_map(|(name, value)| [name.to_owned(), value]);
        self.arguments = mode.into_iter().chain(pairs).collect();
    }
}

/// A size rounded down to whole GiB, or to multiples of 16 MiB below 2 GiB.
fn whole(gib: f64) -> f64 {
    if gib >= 2.0 { gib.floor() } else { (gib * 64.0).floor() / 64.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::parse_list;

    fn options(memory_gib: f64) -> SuiteOptions {
        SuiteOptions {
            model: "llama3.1-8b".to_owned(),
            ranks: 1,
            memory_gib,
            gpu_gib: None,
            users: None,
            many_users: None,
            documents: None,
            lengths: Lengths::default(),
            is_compatible: false,
            seed: 42,
        }
    }

    fn runs(options: &SuiteOptions) -> Vec<SuiteRun> {
        options.runs(&SuiteWorkload::ALL)
    }

    #[test]
    fn the_runs_are_those_of_the_wrapper_on_a_machine_of_64_gib() {
        let facts = |run: SuiteRun| (run.name, run.users, run.gpu_gib, run.cpu_gib, run.seconds);
        let expected = [
            ("gpu-only", 50, 16.0, 4.0, 120),
            ("cpu-only", 50, 0.0, 32.0, 120),
            ("storage-only", 50, 0.0, 4.0, 120),
            ("gpu-cpu", 50, 16.0, 32.0, 120),
            ("cpu-storage", 300, 0.0, 8.0, 120),
            ("gpu-cpu-storage", 300, 16.0, 8.0, 120),
            ("storage-saturation", 300, 0.0, 4.0, 180),
            ("production", 50, 0.0, 32.0, 180),
            ("autoscale", 20, 0.0, 8.0, 300),
            ("capacity-autoscale", 10, 0.0, 4.0, 300),
            ("mlperf option 1", 200, 0.0, 0.0, 300),
            ("mlperf option 2", 100, 0.0, 4.0, 300),
            ("mlperf option 3", 70, 0.0, 0.0, 300),
        ];
        let found: Vec<_> = runs(&options(64.0)).into_iter().map(facts).collect();
        let expected = expected
            .map(|(name, users, gpu, cpu, seconds)| (name.to_owned(), users, gpu, cpu, seconds));
        assert_eq!(found, expected);
        let mut files: Vec<_> = runs(&options(64.0)).into_iter().map(|run| run.file).collect();
        files.sort_unstable();
        files.dedup();
        assert_eq!(files.len(), 13);
    }

    #[test]
    fn each_command_line_has_the_options_of_the_wrapper() {
        let line = |name: &str, options: &SuiteOptions| {
            options.runs(&parse_list(name).unwrap())[0].arguments.join(" ")
        };
        let plain = options(16.0);
        assert_eq!(
            line("autoscale", &plain),
            "--model llama3.1-8b --num-users 20 --duration 300 --gpu-mem-gb 0 --cpu-mem-gb 2 \
             --generation-mode realistic --seed 42 --enable-autoscaling --autoscaler-mode qos \
             --target-saturation 0.8"
        );
        assert_eq!(
            line("capacity-autoscale", &plain),
            "--model llama3.1-70b-instruct --num-users 10 --duration 300 --gpu-mem-gb 0 \
             --cpu-mem-gb 4 --generation-mode none --seed 42 --enable-autoscaling \
             --autoscaler-mode capacity"
        );
        assert_eq!(
            line("mlperf", &plain),
            "--compatible --model llama3.1-8b --num-users 200 --duration 300 --gpu-mem-gb 0 \
             --cpu-mem-gb 0 --generation-mode none --seed 42 --max-concurrent-allocs 16"
        );
        let ranks = SuiteOptions { ranks: 8, gpu_gib: Some(16.0), ..plain.clone() };
        assert_eq!(
            line("gpu-only", &ranks),
            "--model llama3.1-8b --num-users 50 --duration 120 --gpu-mem-gb 2 --cpu-mem-gb 4 \
             --generation-mode realistic --seed 42 --num-gpus 8 --tensor-parallel 8"
        );
        let documents = SuiteOptions { documents: Some(7), gpu_gib: Some(1.5), ..plain };
        assert_eq!(
            line("production", &documents),
            "--model llama3.1-8b --num-users 50 --duration 180 --gpu-mem-gb 1.5 --cpu-mem-gb 8 \
             --generation-mode realistic --seed 42 --enable-rag --rag-num-docs 7"
        );
    }

    #[test]
    fn memory_and_overrides_change_sizes_and_users() {
        let small = options(1.0);
        assert_eq!((small.large_gib(), small.small_gib()), (0.5, 0.125));
        assert_eq!((small.simulated_gpu_gib(), small.high_users()), (0.25, 50));
        let run = &small.runs(&[SuiteWorkload::StorageOnly])[0];
        assert_eq!((run.cpu_gib, run.gpu_gib), (0.5, 0.0));
        assert_eq!(options(23.5).high_users(), 235);
        let many = SuiteOptions { users: Some(400), ..options(64.0) };
        assert_eq!((many.usual_users(), many.high_users()), (400, 400));
        let given = SuiteOptions { many_users: Some(20), ..options(64.0) };
        assert_eq!(given.high_users(), 20);
    }
}
