//! Checks of memory: its size, the limit on locked memory, huge pages, and the pool's directory.

use cascade_block::{ByteSize, with_causes};
use cascade_memory::{PageSource, available_bytes};
use cascade_store::ledger_bytes;

use super::{Check, CheckOutcome, FileSystem, Machine};

/// Names of pool files and of their ledgers begin with this.
const POOL_PREFIX: &str = "cascade";

/// `CAP_IPC_LOCK` in the set of capabilities: the process may lock any amount of memory.
const CAPABILITY_IPC_LOCK: u64 = 1 << 14;

pub(super) const MEMORY: Check = Check {
    id: "memory",
    why: "a node allocates all pools at start, so that memory cannot run out later",
    run: |config, machine| {
        let needed = config.dram_bytes();
        let Some(available) = available_bytes(&|path| machine.read(path)) else {
            return CheckOutcome::warning(
                "available memory is unknown: cannot read /proc/meminfo",
                "mount /proc in this container",
            );
        };
        let running = machine.running_node(&config.socket).map_or(0, |node| node.memory_bytes);
        let available = available.saturating_add(running);
        let (needed_text, text) = (ByteSize(needed).rounded(), ByteSize(available).rounded());
        let of_running = if running > 0 { ", once the node that runs has ended" } else { "" };
        let found = format!("{needed_text} configured, {text} available{of_running}");
        if needed > available {
            let remedy = format!(
                "lower dram (--dram) below {text}, free memory, or raise the limit of the \
                 container or service (systemd: MemoryMax=)"
            );
            return CheckOutcome::failed(found, remedy);
        }
        CheckOutcome::ok(found)
    },
};

pub(super) const MEMLOCK: Check = Check {
    id: "memlock",
    why: "only locked memory can be registered with io_uring and RDMA, which avoids copies and \
          pinning of pages for each transfer",
    run: |config, machine| {
        let needed = config.dram_bytes();
        let Some((soft, _)) = limit(machine, "Max locked memory") else {
            return CheckOutcome::warning("the limit is unknown: cannot read /proc/self/limits", {
                "mount /proc in this container"
            });
        };
        if soft >= needed {
            let text = if soft == u64::MAX { "unlimited".into() } else { ByteSize(soft).rounded() };
            return CheckOutcome::ok(text);
        }
        if is_privileged(machine) {
            return CheckOutcome::ok(format!("{} and CAP_IPC_LOCK", ByteSize(soft).rounded()));
        }
        CheckOutcome::warning(
            format!(
                "limit {}, but DRAM has {}",
                ByteSize(soft).rounded(),
                ByteSize(needed).rounded()
            ),
            "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; Docker: --ulimit memlock=-1",
        )
    },
};

pub(super) const HUGE_PAGES: Check = Check {
    id: "huge_pages",
    why: "pages of 2 MiB make copies faster, and registering the pool cheaper",
    run: |config, machine| {
        if !config.store.huge_pages {
            return CheckOutcome::absent("huge_pages is false");
        }
        let remedy = "Linux 6.1 or later: echo madvise | sudo tee \
                      /sys/kernel/mm/transparent_hugepage/enabled; or reserve huge pages: sudo \
                      sysctl vm.nr_hugepages=N";
        match machine.try_huge_pages() {
            Ok(report) if report.huge_bytes > 0 => CheckOutcome::ok(match report.source {
                PageSource::Reserved => "reserved huge pages are free",
                _ => "transparent huge pages work",
            }),
            Ok(report) => {
                let reason = report.refusal.map_or_else(String::new, |error| format!(" ({error})"));
                CheckOutcome::warning(format!("the kernel provided none{reason}"), remedy)
            }
            Err(error) => CheckOutcome::warning(with_causes(&error), remedy),
        }
    },
};

pub(super) const SHARED_MEMORY: Check = Check {
    id: "shared_memory",
    why: "the pool is a file in this directory: all of it must fit, and only a tmpfs is memory",
    run: |config, machine| {
        let Some(directory) = &config.pool_directory else {
            return CheckOutcome::absent("keep_pool is never: the pool has no file");
        };
        // The pool of the default tenant has a ledger beside it.
        let ledger = ledger_bytes(config.store.dram_bytes);
        let (needed, at) = (config.dram_bytes().saturating_add(ledger), directory.display());
        let space = match machine.space(directory) {
            Ok(space) => space,
            Err(error) => {
                let remedy = format!("sudo mount -t tmpfs tmpfs {at}; or set pool_directory");
                return CheckOutcome::failed(format!("{at}: {error}"), remedy);
            }
        };
        if let Err(error) = machine.may_write(directory) {
            let remedy = format!("sudo chmod 1777 {at}; or set pool_directory");
            return CheckOutcome::failed(format!("{at} is not writable ({error})"), remedy);
        }
        let free = ByteSize(space.free_bytes).rounded();
        let found = format!("{at}: {}, {free} free", space.file_system);
        // The next start takes over the pool of a crashed node, so its space counts as available.
        let own_bytes = machine.used_bytes(directory, POOL_PREFIX).unwrap_or(0);
        if needed > space.free_bytes.saturating_add(own_bytes) {
            let short = needed - space.free_bytes.saturating_add(own_bytes);
            let size = format!("{}M", space.total_bytes.saturating_add(short).div_ceil(1 << 20));
            return CheckOutcome::failed(
                format!("{found}; {} needed, with the ledger", ByteSize(needed).rounded()),
                format!("sudo mount -o remount,size={size} {at}; Docker: --shm-size={size}"),
            );
        }
        if !space.file_system.is_memory() {
            return CheckOutcome::warning(found, "set pool_directory to a tmpfs such as /dev/shm");
        }
        if space.file_system == FileSystem::HUGETLBFS {
            return CheckOutcome::warning(found, {
                "use a tmpfs: the size of the pool is not a multiple of 2 MiB"
            });
        }
        CheckOutcome::ok(found)
    },
};

/// A resource limit of this process, soft and hard. `u64::MAX` means unlimited.
pub(super) fn limit(machine: &dyn Machine, name: &str) -> Option<(u64, u64)> {
    let text = machine.read("/proc/self/limits").ok()?;
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    let mut numbers = rest.split_whitespace().map(|word| match word {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    });
    Some((numbers.next()??, numbers.next()??))
}

/// The memory that this user may lock; none if there is no limit, or it is unknown.
pub(super) fn lockable_bytes(machine: &dyn Machine) -> Option<u64> {
    let (soft, _) = limit(machine, "Max locked memory")?;
    (soft != u64::MAX && !is_privileged(machine)).then_some(soft)
}

fn is_privileged(machine: &dyn Machine) -> bool {
    let status = machine.read("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set & CAPABILITY_IPC_LOCK != 0)
}
