//! Checks of the file tier: directory, free space, file system, direct I/O and `io_uring`.

use std::path::{Path, PathBuf};

use cascade_block::ByteSize;
use cascade_disk::io::{FileOperations as _, RingRefusal, SystemFiles};
use cascade_store::{FilesConfig, IoEngine};

use super::{Check, CheckOutcome, FileSystem, Machine};
use crate::NodeConfig;

const NO_FILES: &str = "no file tier (files is not set)";

pub(super) const DIRECTORY: Check = Check {
    id: "files_directory",
    why: "the file tier stores blocks there",
    run: |config, machine| {
        let directories = directories(config);
        if directories.is_empty() {
            return CheckOutcome::absent(NO_FILES);
        }
        for directory in &directories {
            let at = directory.display();
            let existing = existing(directory);
            if !existing.is_dir() {
                let found = format!("{} is not a directory", existing.display());
                return CheckOutcome::failed(found, "set files (--files) to another path");
            }
            if let Err(error) = machine.try_file(existing) {
                return CheckOutcome::failed(
                    format!("cannot create a file in {} ({error})", existing.display()),
                    format!("sudo install -d -m 0700 -o \"$USER\" {at}; or set files"),
                );
            }
            match cascade_disk::find_block_files(directory) {
                Ok(None) => {}
                Ok(Some(blocks)) => {
                    let blocks = blocks.display();
                    return CheckOutcome::failed(
                        format!("{blocks} has a file for each block, an old layout"),
                        format!("remove {blocks} if its blocks may be dropped, or set files"),
                    );
                }
                Err(error) => {
                    return CheckOutcome::failed(
                        format!("cannot list {at}/blocks ({error})"),
                        format!("sudo chown -R \"$USER\" {at}; or set files"),
                    );
                }
            }
        }
        let mut exposed = None;
        for directory in directories.iter().filter(|directory| directory.exists()) {
            let at = directory.display();
            match SystemFiles.check_directory(directory) {
                Ok(mode) if mode & 0o077 != 0 => exposed = Some((at, mode & 0o777)),
                Ok(_) => {}
                Err(error) => {
                    return CheckOutcome::failed(
                        format!("{at} cannot be used: {error}"),
                        format!("sudo chown -R \"$USER\" {at} && chmod 700 {at}; or set files"),
                    );
                }
            }
        }
        if let Some((at, mode)) = exposed {
            return CheckOutcome::warning(
                format!("{at} is open to other users (mode {mode:04o})"),
                format!("chmod 700 {at}"),
            );
        }
        let names = directories.iter().map(|directory| directory.display().to_string());
        CheckOutcome::ok(names.collect::<Vec<_>>().join(", "))
    },
};

pub(super) const SPACE: Check = Check {
    id: "files_space",
    why: "writes fail if the file system is full before the tier reaches its capacity",
    run: |config, machine| {
        let Some(files) = &config.store.files else { return CheckOutcome::absent(NO_FILES) };
        let tenants = config.tenants.iter().filter_map(|tenant| tenant.store.files.as_ref());
        let below = tenants.filter(|other| other.directory.starts_with(&files.directory));
        let below = below.map(|other| other.capacity_bytes);
        let capacity = below.fold(files.capacity_bytes, u64::saturating_add);
        match space(files, machine) {
            Err(outcome) => outcome,
            Ok((at, space)) => {
                // Files in the directory belong to the tier and count toward its capacity. If the
                // directory is missing, files in its parent do not.
                let is_own = at == files.directory;
                let own = if is_own { machine.used_bytes(at, "").unwrap_or(0) } else { 0 };
                let available = space.free_bytes.saturating_add(own);
                let [free, own, needed] =
                    [space.free_bytes, own, capacity].map(|bytes| ByteSize(bytes).rounded());
                let origin = match config.settings.derived_files_capacity() {
                    Some((_, reason)) => format!("by default ({reason})"),
                    None => "configured".to_owned(),
                };
                let found = format!("{needed} {origin}, {free} free, {own} used by the tier");
                if available >= capacity {
                    return CheckOutcome::ok(found);
                }
                let remedy = match available >> 20 {
                    0 => "free some space, or set files to another file system".to_owned(),
                    mib => format!("lower files_capacity (--files-capacity) to {mib}MiB"),
                };
                CheckOutcome::failed(found, remedy)
            }
        }
    },
};

pub(super) const FILE_SYSTEM: Check = Check {
    id: "file_system",
    why: "blocks in files should survive a reboot, and be read at the speed of a local disk",
    run: |config, machine| {
        let Some(files) = &config.store.files else { return CheckOutcome::absent(NO_FILES) };
        match space(files, machine) {
            Err(outcome) => outcome,
            Ok((_, space)) if space.file_system.is_memory() => CheckOutcome::warning(
                format!("{}: memory, which is lost on reboot", space.file_system),
                "set files to a file system on a disk (df -hT lists them)",
            ),
            Ok((_, space)) if space.file_system == FileSystem::OVERLAY => CheckOutcome::warning(
                "overlay: the container layer, which is deleted with the container",
                "mount a volume and set files to it: docker run -v /srv/cascade:/cache",
            ),
            Ok((_, space)) if space.file_system == FileSystem::NFS => CheckOutcome::warning(
                "nfs: reads depend on the network, and hang if the server is unavailable",
                "set files to a local disk (df -hT lists them)",
            ),
            Ok((_, space)) => CheckOutcome::ok(space.file_system.to_string()),
        }
    },
};

pub(super) const DIRECT_IO: Check = Check {
    id: "direct_io",
    why: "direct I/O bypasses the page cache: no second copy of a block, no extra memory",
    run: |config, machine| {
        let Some(files) = &config.store.files else { return CheckOutcome::absent(NO_FILES) };
        if !files.direct {
            return CheckOutcome::absent("direct_io is false");
        }
        match machine.try_file(existing(&files.directory)) {
            Ok(probe) => match probe.direct_refusal {
                None => CheckOutcome::ok("O_DIRECT works"),
                Some(error) => CheckOutcome::warning(
                    format!("the file system refuses O_DIRECT ({error}); the page cache is used"),
                    "use ext4 or xfs; or set direct_io = false to accept this",
                ),
            },
            Err(error) => CheckOutcome::failed(
                format!("cannot create a file in {} ({error})", files.directory.display()),
                "see files_directory",
            ),
        }
    },
};

pub(super) const IO_URING: Check = Check {
    id: "io_uring",
    why: "one system call submits a whole batch of reads; without it a few threads do them",
    run: |config, machine| {
        let Some(files) = &config.store.files else { return CheckOutcome::absent(NO_FILES) };
        match (files.engine, machine.try_ring()) {
            (IoEngine::Psync, _) => CheckOutcome::absent("io_engine is psync"),
            (_, Ok(true)) => CheckOutcome::ok("allowed, with registered memory"),
            (_, Ok(false)) => CheckOutcome::warning(
                "allowed, but memory cannot be registered",
                "see huge_pages and memlock; rings can share registered buffers from Linux 6.12 on",
            ),
            (engine, Err(error)) => {
                let refusal = RingRefusal::of(&error);
                if engine == IoEngine::Uring {
                    return CheckOutcome::failed(
                        format!("{refusal} ({error}), and io_engine is uring"),
                        format!("{}; or set io_engine = auto", refusal.remedy()),
                    );
                }
                let found = format!("{refusal} ({error}); psync is used");
                CheckOutcome::warning(found, refusal.remedy())
            }
        }
    },
};

/// The directories of all file tiers.
fn directories(config: &NodeConfig) -> Vec<PathBuf> {
    let tenants = config.tenants.iter().map(|tenant| &tenant.store);
    let stores = std::iter::once(&config.store).chain(tenants);
    stores.filter_map(|store| Some(store.files.as_ref()?.directory.clone())).collect()
}

/// The directory, or its nearest parent that exists. The node creates the rest.
fn existing(directory: &Path) -> &Path {
    directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"))
}

fn space<'a>(
    files: &'a FilesConfig,
    machine: &dyn Machine,
) -> Result<(&'a Path, super::DiskSpace), CheckOutcome> {
    let at = existing(&files.directory);
    machine.space(at).map(|space| (at, space)).map_err(|error| {
        CheckOutcome::failed(format!("{}: {error}", at.display()), "see files_directory")
    })
}
