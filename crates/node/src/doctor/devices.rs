//! Checks of the kernel, clocks and devices.

use super::{Check, Machine, Outcome};

/// The first second of 2024: a clock that shows less was never set.
const CLOCK_LEAST: u64 = 1_704_067_200;
/// The first second of 2100.
const CLOCK_MOST: u64 = 4_102_444_800;

/// Clock sources whose reading is a few nanoseconds, not a trip to a chip.
const FAST_CLOCKS: [&str; 5] =
    ["tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen"];

/// What the NVIDIA driver's library is called, and where it lies.
const CUDA_LIBRARY: &str = "libcuda.so.1";
const LIBRARY_DIRECTORIES: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
];

pub(super) const KERNEL: Check = Check {
    id: "kernel",
    why: "memory is taken at start with MADV_POPULATE_WRITE (Linux 5.14) and collapsed into huge \
          pages with MADV_COLLAPSE (Linux 6.1)",
    run: |_, machine| {
        let release = machine.read("/proc/sys/kernel/osrelease").unwrap_or_default();
        let release = release.trim();
        let found = format!("Linux {release}; cascade {}", env!("CARGO_PKG_VERSION"));
        let mut parts = release.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
        let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) else {
            return Outcome::warning(found, "mount /proc, so that the version can be read");
        };
        let version: (u32, u32) = (major, minor);
        if version < (5, 14) {
            return Outcome::failed(found, "install a kernel of 5.14 or later, best 6.1 or later");
        }
        if version < (6, 1) {
            return Outcome::warning(found, "install a kernel of 6.1 or later for huge pages");
        }
        Outcome::ok(found)
    },
};

pub(super) const CLOCK: Check = Check {
    id: "clock",
    why: "times in logs, certificates and expiry depend on it; each call reads it several times",
    run: |_, machine| {
        let now = machine.unix_seconds();
        if !(CLOCK_LEAST..CLOCK_MOST).contains(&now) {
            let found = format!("it shows {now} seconds since 1970");
            return Outcome::failed(found, "sudo timedatectl set-ntp true");
        }
        let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
        let Ok(source) = machine.read(path) else { return Outcome::ok("set") };
        let source = source.trim();
        if FAST_CLOCKS.contains(&source) {
            return Outcome::ok(format!("set; source {source}"));
        }
        Outcome::warning(
            format!("set; source {source} takes microseconds to read"),
            format!("cat {} lists others; echo tsc | sudo tee {path}", {
                path.replace("current", "available")
            }),
        )
    },
};

pub(super) const CUDA: Check = Check {
    id: "cuda",
    why: "blocks move to and from GPUs by the driver's own library",
    run: |_, machine| {
        let Ok(version) = machine.read("/proc/driver/nvidia/version") else {
            return Outcome::absent("no NVIDIA driver is loaded");
        };
        let version = version.lines().next().unwrap_or_default().to_owned();
        let has_library = |directory: &&&str| {
            machine.list(directory).is_ok_and(|names| names.iter().any(|name| name == CUDA_LIBRARY))
        };
        match LIBRARY_DIRECTORIES.iter().find(has_library) {
            Some(directory) => Outcome::ok(format!("{version}; {directory}/{CUDA_LIBRARY}")),
            None => Outcome::warning(
                format!("{version}, but no {CUDA_LIBRARY}"),
                "install the driver's library (Debian: apt-get install libcuda1), or run the \
                 container with --gpus all",
            ),
        }
    },
};

pub(super) const RDMA: Check = Check {
    id: "rdma",
    why: "blocks move between hosts without the processor",
    run: |_, machine| {
        let names = machine.list(INFINIBAND).unwrap_or_default();
        if names.is_empty() {
            return Outcome::absent("no RDMA device");
        }
        let active: Vec<&str> =
            names.iter().map(String::as_str).filter(|name| is_active(machine, name)).collect();
        if active.is_empty() {
            return Outcome::warning(
                format!("{}: no port is active", names.join(", ")),
                "rdma link shows why; sudo ip link set DEVICE up",
            );
        }
        let has_verbs = machine
            .list("/dev/infiniband")
            .is_ok_and(|names| names.iter().any(|name| name.starts_with("uverbs")));
        if !has_verbs {
            return Outcome::warning(
                format!("{}: no /dev/infiniband/uverbs*", active.join(", ")),
                "sudo modprobe ib_uverbs; Docker: --device /dev/infiniband",
            );
        }
        Outcome::ok(active.join(", "))
    },
};

const INFINIBAND: &str = "/sys/class/infiniband";

fn is_active(machine: &dyn Machine, device: &str) -> bool {
    let ports = format!("{INFINIBAND}/{device}/ports");
    let is_up = |port: &String| {
        let state = machine.read(&format!("{ports}/{port}/state"));
        state.is_ok_and(|state| state.contains("ACTIVE"))
    };
    machine.list(&ports).is_ok_and(|names| names.iter().any(is_up))
}

pub(super) const VALKEY: Check = Check {
    id: "valkey",
    why: "nodes of a cluster find each other and each other's blocks by it",
    run: |_, _| Outcome::absent("no cluster is configured"),
};
