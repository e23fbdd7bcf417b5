//! Checks of the kernel, of clocks, and of what is not there yet.

use super::{Check, CheckOutcome};

/// The first second of 2024. An earlier time means that the clock was never set.
const CLOCK_MIN: u64 = 1_704_067_200;
/// The first second of 2100.
const CLOCK_MAX: u64 = 4_102_444_800;

/// Clock sources that are read within nanoseconds, without access to a device.
const FAST_CLOCKS: [&str; 5] =
    ["tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen"];

pub(super) const KERNEL: Check = Check {
    id: "kernel",
    why: "a node allocates memory at start with MADV_POPULATE_WRITE (Linux 5.14), and uses \
          MADV_COLLAPSE for huge pages (Linux 6.1)",
    run: |_, machine| {
        let release = machine.read("/proc/sys/kernel/osrelease").unwrap_or_default();
        let release = release.trim();
        let found = format!("Linux {release}; cascade {}", env!("CARGO_PKG_VERSION"));
        let mut parts = release.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
        let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) else {
            return CheckOutcome::warning(found, "mount /proc: it contains the version");
        };
        let version: (u32, u32) = (major, minor);
        if version < (5, 14) {
            return CheckOutcome::failed(
                found,
                "install Linux 5.14 or later, preferably 6.1 or later",
            );
        }
        if version < (6, 1) {
            return CheckOutcome::warning(found, "install Linux 6.1 or later for huge pages");
        }
        CheckOutcome::ok(found)
    },
};

pub(super) const CLOCK: Check = Check {
    id: "clock",
    why: "logs, certificates and expiry depend on it, and each call reads it several times",
    run: |_, machine| {
        let now = machine.unix_seconds();
        if !(CLOCK_MIN..CLOCK_MAX).contains(&now) {
            let found = format!("not set: {now} s since 1970");
            return CheckOutcome::failed(found, "sudo timedatectl set-ntp true");
        }
        let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
        let Ok(source) = machine.read(path) else { return CheckOutcome::ok("set") };
        let source = source.trim();
        if FAST_CLOCKS.contains(&source) {
            return CheckOutcome::ok(format!("set; source {source}"));
        }
        CheckOutcome::warning(
            format!("set; reading the source {source} takes microseconds"),
            format!("choose a faster source from {}: echo tsc | sudo tee {path}", {
                path.replace("current", "available")
            }),
        )
    },
};

pub(super) const VALKEY: Check = Check {
    id: "valkey",
    why: "it is the directory of nodes and blocks of a cluster",
    run: |_, _| CheckOutcome::absent("no cluster is configured"),
};
