//! A simulated machine, and what its GPU says.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use cascade_memory::{MemoryError, PageReport, PageSource};
use cascade_node::doctor::{
    DiskSpace, FileSystem, GpuAnswer, GpuDevice, GpuReport, Machine, ProbeFile, RunningNode,
    ThisMachine,
};
use cascade_node::socket_place::{SocketPathState, SocketPlaceError};
use cascade_store::LeftoverPool;

use super::GIB;

/// A simulated machine: healthy, except for what a test changes.
#[derive(Debug)]
pub(crate) struct FakeMachine {
    pub(crate) texts: BTreeMap<String, String>,
    pub(crate) lists: BTreeMap<String, Vec<String>>,
    pub(crate) pool: DiskSpace,
    pub(crate) files: DiskSpace,
    pub(crate) read_only: Option<PathBuf>,
    pub(crate) running: Option<RunningNode>,
    pub(crate) direct_refusal: Option<io::ErrorKind>,
    pub(crate) huge_bytes: usize,
    pub(crate) ring: Result<bool, io::ErrorKind>,
    pub(crate) unix_seconds: u64,
    pub(crate) verbs: Result<(), String>,
    pub(crate) left_pools: Vec<LeftoverPool>,
    pub(crate) gpus: GpuAnswer,
    /// `try_ring` blocks until the sender is dropped.
    pub(crate) hangs_until: Option<Mutex<mpsc::Receiver<()>>>,
}

impl FakeMachine {
    pub(crate) fn healthy() -> Self {
        let texts = [
            ("/proc/sys/kernel/osrelease", "6.12.5-generic\n"),
            ("/proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable:   33554432 kB\n"),
            ("/proc/self/status", "Name:\tcascade\nCapEff:\t0000000000000000\n"),
            (
                "/proc/self/limits",
                "Limit                     Soft Limit           Hard Limit           Units\n\
                 Max open files            65536                65536                files\n\
                 Max locked memory         unlimited            unlimited            bytes\n",
            ),
            ("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
            ("/proc/driver/nvidia/version", "NVRM version: 570.1\nGCC version: 12\n"),
            ("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
        ];
        let lists = [
            ("/sys/class/infiniband", "mlx5_0"),
            ("/sys/class/infiniband/mlx5_0/ports", "1"),
            ("/dev/infiniband", "uverbs0"),
        ];
        let space =
            |file_system| DiskSpace { file_system, free_bytes: 20 * GIB, total_bytes: 32 * GIB };
        Self {
            texts: texts.map(|(path, text)| (path.to_owned(), text.to_owned())).into(),
            lists: lists.map(|(path, name)| (path.to_owned(), vec![name.to_owned()])).into(),
            pool: space(FileSystem::TMPFS),
            files: space(FileSystem(0xef53)),
            direct_refusal: None,
            read_only: None,
            running: None,
            huge_bytes: 4 << 20,
            ring: Ok(true),
            unix_seconds: 1_800_000_000,
            verbs: Ok(()),
            left_pools: Vec::new(),
            gpus: GpuAnswer::Found(gpu_report()),
            hangs_until: None,
        }
    }

    pub(crate) fn text(&mut self, path: &str, text: &str) {
        self.texts.insert(path.to_owned(), text.to_owned());
    }
}

impl Machine for FakeMachine {
    fn read(&self, path: &str) -> io::Result<String> {
        self.texts.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.lists.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn space(&self, directory: &Path) -> io::Result<DiskSpace> {
        Ok(if directory == Path::new("/dev/shm") { self.pool } else { self.files })
    }

    fn used_bytes(&self, _: &Path, _: &str) -> io::Result<u64> {
        Ok(0)
    }

    fn try_file(&self, _: &Path) -> io::Result<ProbeFile> {
        Ok(ProbeFile { direct_refusal: self.direct_refusal.map(Into::into) })
    }

    fn may_write(&self, directory: &Path) -> io::Result<()> {
        let is_read_only = self.read_only.as_deref() == Some(directory);
        if is_read_only { Err(io::ErrorKind::PermissionDenied.into()) } else { Ok(()) }
    }

    fn socket(&self, path: &Path) -> Result<SocketPathState, SocketPlaceError> {
        ThisMachine::default().socket(path)
    }

    fn running_node(&self, _: &Path) -> Option<RunningNode> {
        self.running.clone()
    }

    fn try_listen(&self, address: SocketAddr) -> io::Result<()> {
        ThisMachine::default().try_listen(address)
    }

    fn try_huge_pages(&self) -> Result<PageReport, MemoryError> {
        let source = PageSource::Collapsed;
        let refusal = (self.huge_bytes == 0).then(|| io::ErrorKind::InvalidInput.into());
        Ok(PageReport { source, huge_bytes: self.huge_bytes, refusal })
    }

    fn try_ring(&self) -> io::Result<bool> {
        if let Some(end) = &self.hangs_until {
            assert!(end.lock().unwrap().recv().is_err(), "nothing is sent");
        }
        self.ring.map_err(Into::into)
    }

    fn try_verbs(&self) -> Result<(), String> {
        self.verbs.clone()
    }

    fn left_pools(&self, _: &Path) -> io::Result<Vec<LeftoverPool>> {
        Ok(self.left_pools.clone())
    }

    fn unix_seconds(&self) -> u64 {
        self.unix_seconds
    }

    fn gpus(&self, _: Duration) -> GpuAnswer {
        self.gpus.clone()
    }
}

/// A driver with one GPU.
pub(crate) fn gpu_report() -> GpuReport {
    GpuReport {
        is_fake: false,
        library: "libcuda.so.1".to_owned(),
        cuda_version: "13.0".to_owned(),
        batched_copy: Some("cuMemcpyBatchAsync_v2".to_owned()),
        missing_functions: Vec::new(),
        devices: vec![GpuDevice {
            name: "NVIDIA H100 80GB HBM3".to_owned(),
            uuid: "GPU-1".to_owned(),
            pci_address: "0000:1B:00.0".to_owned(),
            memory_bytes: 80 * GIB,
            compute_capability: "9.0".to_owned(),
        }],
    }
}
