//! What a run needs: sizes of the tiers, workers, batches. Refuses what the machine cannot give.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::ByteSize;
use cascade_kv_bench::GIB;
use cascade_kv_bench::compatible::entry::PIECE_BYTES;
use cascade_kv_bench::compatible::plan::{self as object_plan, STORED_TOKENS, Schedule};
use cascade_kv_bench::config_file::ConfigFile;
use cascade_kv_bench::directory::BenchDirectory;
use cascade_kv_bench::model::KvModel;
use cascade_kv_bench::plan::{UserPlan, Workload};
use cascade_kv_bench::prepare::Precondition;
use cascade_kv_bench::recorded::Recorded;
use cascade_kv_bench::retrieval::{CHUNK_TOKENS, CHUNKS_READ};
use cascade_kv_bench::run::RunOptions;
use cascade_kv_bench::store_backend::TierSizes;

use crate::Failure;
use crate::bench::kv::args::KvArgs;

/// Most threads that serve requests. More of them do not make a disk faster; other requests wait in
/// the queue, by class.
const WORKERS_MAX: u64 = 64;
/// Most threads that serve requests in compatible mode, as in the original: one for each user.
const OBJECT_WORKERS_MAX: u32 = 500;
/// Most bytes of one call.
const BATCH_BYTES_MAX: u64 = 32 << 20;
/// Least size of the pool that blocks pass through without a DRAM tier.
const STAGING_BYTES_MIN: u64 = 256 << 20;
/// Parts of the pool that are in calls at once: a quarter, so that three quarters keep blocks.
const SHARES_OF_POOL: u64 = 4;
/// Memory of the process beside the tiers.
const OTHER_MEMORY_BYTES: u64 = 256 << 20;
/// Least size of the file tier.
const FILES_BYTES_MIN: u64 = 64 << 20;

/// A run before its start.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) workload: Workload,
    pub(super) sizes: TierSizes,
    pub(super) options: RunOptions,
    /// Whether it does what the original does.
    pub(super) is_compatible: bool,
    /// What the user should know before.
    pub(super) notes: Vec<String>,
}

impl Setup {
    pub(super) fn new(
        (args, config): (&KvArgs, &ConfigFile),
        model: KvModel,
        recorded: Option<Arc<Recorded>>,
        directory: &BenchDirectory,
    ) -> Result<Self, Failure> {
        if args.compatible {
            return Self::of_objects((args, config), model, recorded, directory);
        }
        let mut notes = notes(args);
        let block_bytes = model.block_bytes as u64;
        // Autoscaling may add any number of users.
        let num_users = recorded.as_ref().map_or(args.num_users, |it| it.users(args.num_users));
        let users = if args.enable_autoscaling { WORKERS_MAX } else { u64::from(num_users) };
        let users = users.min(WORKERS_MAX);
        let cpu_bytes = bytes(args.cpu_mem_gb);
        let staging_bytes = STAGING_BYTES_MIN.max(users * block_bytes * SHARES_OF_POOL);
        let pool = if cpu_bytes > 0 { cpu_bytes } else { staging_bytes };
        let workers = users.min(pool / (block_bytes * SHARES_OF_POOL));
        if workers == 0 {
            let least = ByteSize(block_bytes * SHARES_OF_POOL).rounded();
            return Err(Failure::usage(
                format!("--cpu-mem-gb {} is less than four blocks ({least})", args.cpu_mem_gb),
                "raise it, or give 0 for no DRAM tier",
            ));
        }
        let share = (pool / SHARES_OF_POOL / workers).min(BATCH_BYTES_MAX);
        let batch_blocks = usize::try_from((share / block_bytes).max(1)).unwrap_or(1);
        let gpu_bytes = bytes(args.gpu_mem_gb * f64::from(args.num_gpus));
        check_memory(args, gpu_bytes + pool)?;
        if cpu_bytes == 0 {
            notes.push(format!(
                "no DRAM tier: blocks pass through a pool of {}, which keeps none",
                ByteSize(pool).rounded()
            ));
        }
        let workload = workload((args, config), model, num_users, recorded)?;
        notes.extend(workload.recorded.as_ref().map(|recorded| recorded.text()));
        let largest = (0..workload.users)
            .map(|user| UserPlan::new(&workload, user).next_request(&workload).total_blocks)
            .max()
            .unwrap_or(0);
        let recorded = workload.recorded.as_ref().map(|it| it.context_tokens_max());
        let largest = largest.max(workload.model.whole_blocks(recorded.unwrap_or(0)));
        let needs =
            FilesNeed { largest: largest * block_bytes, stored: workload.stored_bytes(), above: 0 };
        let files_bytes = files_bytes(args, &workload, &needs, directory, &mut notes)?;
        let sizes = TierSizes { gpu_bytes, cpu_bytes, staging_bytes, files_bytes };
        let options = options((args, config), usize::try_from(workers).unwrap_or(1), batch_blocks);
        Ok(Self { workload, sizes, options, is_compatible: false, notes })
    }

    /// A run as the original does it.
    fn of_objects(
        (args, config): (&KvArgs, &ConfigFile),
        model: KvModel,
        recorded: Option<Arc<Recorded>>,
        directory: &BenchDirectory,
    ) -> Result<Self, Failure> {
        let mut notes = notes(args);
        let workers = args.num_users.min(OBJECT_WORKERS_MAX);
        let gpu_bytes = bytes(args.gpu_mem_gb * f64::from(args.num_gpus));
        let cpu_bytes = bytes(args.cpu_mem_gb);
        check_memory(args, gpu_bytes + cpu_bytes + u64::from(workers) * PIECE_BYTES as u64)?;
        let workload = object_workload((args, config), model, recorded)?;
        notes.extend(workload.recorded.as_ref().map(|recorded| recorded.text()));
        let tokens = match &workload.recorded {
            Some(recorded) => recorded.request_tokens_max(),
            None => Schedule::new(&workload).context_tokens_max(),
        };
        let question_tokens = if args.enable_rag { CHUNK_TOKENS * CHUNKS_READ as u64 } else { 0 };
        let tokens = tokens.max(STORED_TOKENS).max(question_tokens);
        let needs = FilesNeed {
            largest: tokens * workload.model.bytes_per_token,
            stored: object_plan::stored_bytes(&workload),
            above: gpu_bytes + cpu_bytes,
        };
        let files_bytes = files_bytes(args, &workload, &needs, directory, &mut notes)?;
        let sizes = TierSizes { gpu_bytes, cpu_bytes, staging_bytes: 0, files_bytes };
        let options = options((args, config), usize::try_from(workers).unwrap_or(1), 1);
        Ok(Self { workload, sizes, options, is_compatible: true, notes })
    }
}

impl Setup {
    /// A run whose operations are logged and not done: it needs neither memory nor a disk. Without
    /// a size, the file tier has no limit, or that of the disk that the user names.
    pub(super) fn of_log(
        (args, config): (&KvArgs, &ConfigFile),
        recorded: Option<Arc<Recorded>>,
    ) -> Result<Self, Failure> {
        let workload = object_workload((args, config), args.model(config)?, recorded)?;
        let mut notes = notes(args);
        notes.extend(workload.recorded.as_ref().map(|recorded| recorded.text()));
        let workers = args.num_users.min(OBJECT_WORKERS_MAX);
        let files_bytes = match (bytes(args.storage_capacity_gb), &args.cache_dir) {
            (0, None) => u64::MAX,
            (0, Some(directory)) => BenchDirectory::free_bytes_of(directory)? / 10 * 9,
            (given, _) => given,
        };
        let sizes = TierSizes {
            gpu_bytes: bytes(args.gpu_mem_gb * f64::from(args.num_gpus)),
            cpu_bytes: bytes(args.cpu_mem_gb),
            staging_bytes: 0,
            files_bytes,
        };
        let options = RunOptions {
            verifies: false,
            ..options((args, config), usize::try_from(workers).unwrap_or(1), 1)
        };
        Ok(Self { workload, sizes, options, is_compatible: true, notes })
    }
}

/// What is known before anything is sized.
fn notes(args: &KvArgs) -> Vec<String> {
    let config = args.config.as_ref();
    config.map(|path| format!("settings of {}", path.display())).into_iter().collect()
}

fn workload(
    (args, config): (&KvArgs, &ConfigFile),
    model: KvModel,
    users: u32,
    recorded: Option<Arc<Recorded>>,
) -> Result<Workload, Failure> {
    let seed = match args.seed {
        Some(seed) => seed,
        None => {
            cascade_runtime::random_u64().map_err(|error| Failure::other("choose a seed", error))?
        }
    };
    Ok(Workload {
        model,
        users,
        seed,
        has_multi_turn: !args.disable_multi_turn,
        has_shared_prompts: !args.disable_prefix_caching && recorded.is_none(),
        documents: args.documents(),
        phases: args.phases(),
        requests_max: requests_max(args, recorded.as_deref()),
        recorded,
        settings: config.settings,
    })
}

/// A workload of whole entries. Recorded requests are counted to have system prompts, too.
fn object_workload(
    (args, config): (&KvArgs, &ConfigFile),
    model: KvModel,
    recorded: Option<Arc<Recorded>>,
) -> Result<Workload, Failure> {
    let all = recorded.as_ref().and_then(|recorded| recorded.all_requests());
    let workload = workload((args, config), model, args.num_users, recorded)?;
    Ok(Workload {
        has_shared_prompts: !args.disable_prefix_caching,
        requests_max: workload.requests_max.into_iter().chain(all).min(),
        ..workload
    })
}

fn options(
    (args, config): (&KvArgs, &ConfigFile),
    workers: usize,
    batch_blocks: usize,
) -> RunOptions {
    RunOptions {
        workers,
        batch_blocks,
        duration: Duration::from_secs(args.duration),
        request_rate: (args.request_rate > 0.0).then_some(args.request_rate),
        token_time: args.generation_mode.token_time(config),
        prefills_max: args.max_concurrent_allocs,
        verifies: !args.no_verify,
        device: None,
        precondition: precondition(args, workers),
        autoscaling: args.autoscaling(config),
    }
}

/// The limit of the number of requests: that of the user, or the passes through a trace.
fn requests_max(args: &KvArgs, recorded: Option<&Recorded>) -> Option<u64> {
    let given = (args.max_requests > 0).then_some(args.max_requests);
    let limits = given.into_iter().chain(recorded.and_then(Recorded::requests_max));
    limits.min()
}

/// What is written before the window.
fn precondition(args: &KvArgs, workers: usize) -> Option<Precondition> {
    let gib = match args.precondition_size_gb {
        gib if gib > 0.0 => gib,
        _ => 2.0 * args.storage_capacity_gb,
    };
    let threads = match args.precondition_threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    // Each thread holds a block of the pool, which has room for those of all workers.
    let threads = threads.min(workers);
    args.precondition.then(|| Precondition { bytes: bytes(gib), threads })
}

/// Refuses tiers that do not fit into memory, before anything is allocated.
fn check_memory(args: &KvArgs, tiers: u64) -> Result<(), Failure> {
    let needed = tiers.saturating_add(OTHER_MEMORY_BYTES);
    let available = cascade_memory::available_bytes(&|path| std::fs::read_to_string(path));
    let shares = args.mlperf.memory_shares;
    match available.map(|bytes| bytes / shares) {
        Some(available) if available < needed => Err(Failure::usage(
            format!(
                "--gpu-mem-gb {} x {} and --cpu-mem-gb {} need {} of memory; {} are available{}",
                args.gpu_mem_gb,
                args.num_gpus,
                args.cpu_mem_gb,
                ByteSize(needed).rounded(),
                ByteSize(available).rounded(),
                for_each(shares),
            ),
            "lower them: --gpu-mem-gb 0 measures without the simulated GPU tier",
        )),
        _ => Ok(()),
    }
}

/// What a run needs of files, in bytes.
struct FilesNeed {
    /// Its largest request.
    largest: u64,
    /// All that is stored, as far as it is known.
    stored: u64,
    /// What of it stays in tiers above, without being in files, too.
    above: u64,
}

/// The size of the file tier. Refuses one that cannot work, notes one that evicts.
fn files_bytes(
    args: &KvArgs,
    workload: &Workload,
    needs: &FilesNeed,
    directory: &BenchDirectory,
    notes: &mut Vec<String>,
) -> Result<u64, Failure> {
    let shares = args.mlperf.disk_shares;
    let free = directory.free_bytes().unwrap_or(u64::MAX / 2) / shares;
    let asked = bytes(args.storage_capacity_gb);
    let size = if asked > 0 { asked } else { free / 10 * 9 };
    // The largest request twice, because a reclaim drops a quarter of a small tier at once.
    let least = FILES_BYTES_MIN.max(2 * needs.largest);
    if size > free || size < least {
        return Err(Failure::usage(
            format!(
                "the file tier would have {}, {} are free{}, and one request needs at least {}",
                ByteSize(size).rounded(),
                ByteSize(free).rounded(),
                for_each(shares),
                ByteSize(least).rounded(),
            ),
            "give a --cache-dir with more space, another --storage-capacity-gb, or a smaller model",
        ));
    }
    let stored = needs.stored.saturating_sub(needs.above);
    if stored > size / 10 * 9 {
        let what = match workload.requests_max {
            Some(requests) => format!("{requests} requests"),
            None => "the first requests of all users".to_owned(),
        };
        let lost = if args.compatible {
            "the least recently used entries will be dropped"
        } else {
            "blocks will be evicted and computed again"
        };
        notes.push(format!(
            "{what} store {}, and the file tier has {}: {lost}",
            ByteSize(stored).rounded(),
            ByteSize(size).rounded(),
        ));
    }
    Ok(size)
}

/// Says that ranks divide what is there.
fn for_each(shares: u64) -> String {
    if shares > 1 { format!(" for each of {shares} ranks") } else { String::new() }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a size that was checked to be within 0 and 2^47 bytes"
)]
fn bytes(gib: f64) -> u64 {
    (gib * GIB) as u64
}
