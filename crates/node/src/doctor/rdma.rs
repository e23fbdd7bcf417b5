//! The check of RDMA. A host without a device is no worse a host: no outcome here is a failure.

use cascade_block::ByteSize;

use super::memory::lockable_bytes;
use super::{Check, CheckOutcome, Machine};

const INFINIBAND: &str = "/sys/class/infiniband";

pub(super) const RDMA: Check = Check {
    id: "rdma",
    why: "blocks are copied between hosts without using the CPU",
    run: |_, machine| {
        let mut names = machine.list(INFINIBAND).unwrap_or_default();
        names.sort();
        if names.is_empty() {
            return CheckOutcome::absent("no RDMA device");
        }
        let (active, idle): (Vec<String>, Vec<String>) =
            names.into_iter().partition(|name| is_active(machine, name));
        if active.is_empty() {
            return CheckOutcome::warning(
                format!("{}: no port is active", idle.join(", ")),
                "run `rdma link` for the state of each port; sudo ip link set DEVICE up",
            );
        }
        let mut found = active.join(", ");
        if !idle.is_empty() {
            found = format!("{found}; without an active port: {}", idle.join(", "));
        }
        let has_verbs = machine
            .list("/dev/infiniband")
            .is_ok_and(|names| names.iter().any(|name| name.starts_with("uverbs")));
        if !has_verbs {
            return CheckOutcome::warning(
                format!("{found}: no /dev/infiniband/uverbs*"),
                "sudo modprobe ib_uverbs; Docker: --device /dev/infiniband",
            );
        }
        if let Err(reason) = machine.try_verbs() {
            // The message ends with what to do.
            let (reason, remedy) = reason.rsplit_once("; ").unwrap_or((&reason, ""));
            return CheckOutcome::warning(format!("{found}: {reason}"), remedy);
        }
        // The check `memlock` warns of a limit that is too low.
        let limit = lockable_bytes(machine).map_or_else(String::new, |limit| {
            format!("; at most {} can be registered", ByteSize(limit).rounded())
        });
        CheckOutcome::ok(format!("{found}{limit}"))
    },
};

fn is_active(machine: &dyn Machine, device: &str) -> bool {
    let ports = format!("{INFINIBAND}/{device}/ports");
    let is_up = |port: &String| {
        let state = machine.read(&format!("{ports}/{port}/state"));
        state.is_ok_and(|state| state.contains("ACTIVE"))
    };
    machine.list(&ports).is_ok_and(|names| names.iter().any(is_up))
}
