//! Which clients may have registered the pool with a device.
//!
//! A registration keeps the pages that the pool had at that time. If the pool gives them back to
//! the system, they stay allocated; and if it gets other pages in their place, the device uses the
//! wrong ones. A client does not say what it registers, so every client counts that has opened a
//! device with which it can.

use std::fs;
use std::path::Path;

use super::ClientSessions;
use super::session::ClientSession;
use crate::tenants::Tenant;

/// What descriptors of such devices refer to: GPUs of NVIDIA and AMD, and RDMA adapters.
const DEVICES: &[&str] = &["/dev/nvidia", "/dev/kfd", "/dev/infiniband/"];

/// A client of this tenant that may have registered the pool, in words.
pub(crate) fn pinning_client(sessions: &ClientSessions, tenant: &Tenant) -> Option<String> {
    let sessions = sessions.all().into_iter().filter(|its| its.maps_pool_of(tenant));
    sessions.into_iter().find_map(|session| describe(&session))
}

fn describe(session: &ClientSession) -> Option<String> {
    let snapshot = session.snapshot();
    let client = format!("client {:?} (process {})", snapshot.name, snapshot.process);
    match u32::try_from(snapshot.process).ok().filter(|process| *process > 0) {
        // The node itself, in tests and in an embedding program: its store knows what it registers.
        Some(process) if process == std::process::id() => None,
        Some(process) => match opened_device(Path::new(&format!("/proc/{process}/fd"))) {
            Ok(device) => device.map(|device| format!("{client} has opened {device}")),
            // It has ended, and its mapping with it.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => Some(format!("what {client} has opened is unknown ({error})")),
        },
        None => Some(format!("{client} is in another process namespace")),
    }
}

/// The first device among the descriptors of a process.
fn opened_device(descriptors: &Path) -> std::io::Result<Option<String>> {
    for descriptor in fs::read_dir(descriptors)? {
        // One that was closed meanwhile has no target.
        let Ok(target) = fs::read_link(descriptor?.path()) else { continue };
        let target = target.to_string_lossy();
        if DEVICES.iter().any(|device| target.starts_with(device)) {
            return Ok(Some(target.into_owned()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_process_with_a_device_is_found_by_its_descriptors() {
        let directory = tempfile::tempdir().unwrap();
        symlink("/dev/null", directory.path().join("0")).unwrap();
        symlink("socket:[12345]", directory.path().join("1")).unwrap();
        assert_eq!(opened_device(directory.path()).unwrap(), None);
        for device in ["/dev/nvidiactl", "/dev/kfd", "/dev/infiniband/uverbs0"] {
            symlink(device, directory.path().join("2")).unwrap();
            assert_eq!(opened_device(directory.path()).unwrap().as_deref(), Some(device));
            fs::remove_file(directory.path().join("2")).unwrap();
        }
        let own = Path::new("/proc/self/fd");
        opened_device(own).expect("it can be read");
    }
}
