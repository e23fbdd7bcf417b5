//! What sysfs says of RDMA devices: ports, GIDs, and where in the machine they are.

use std::fmt;
use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// Where Linux mounts sysfs.
pub const SYSFS: &str = "/sys";

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// The bridges and devices from the root of the PCIe tree to it, such as `pci0000:00`,
    /// `0000:00:01.0`, `0000:01:00.0`. Empty for a device that is not on PCIe.
    pub pcie_path: Vec<String>,
    /// Its NUMA node, if the machine says so.
    pub numa_node: Option<u32>,
    /// Its ports, by number.
    pub ports: Vec<PortFacts>,
}

/// A port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortFacts {
    /// Its number; the first is 1.
    pub number: u8,
    /// Whether its link is up.
    pub is_active: bool,
    /// The network below it.
    pub link_layer: LinkLayer,
    /// Its addresses, by index.
    pub gids: Vec<Gid>,
}

/// The network below RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand, with local IDs of its own.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
}

/// An address of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gid {
    /// Its index in the table of the port.
    pub index: u8,
    /// The address, in the form of an IPv6 address.
    pub address: Ipv6Addr,
    /// What packets with it look like.
    pub kind: GidKind,
}

/// What packets of an address look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand, or RoCE version 1, which no router forwards.
    First,
    /// RoCE version 2: UDP.
    Udp,
}

impl Gid {
    /// The IPv4 address that it stands for.
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        self.address.to_ipv4_mapped()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            GidKind::First => "v1",
            GidKind::Udp => "v2",
        };
        write!(f, "{} ({}, {kind})", self.index, self.address)
    }
}

/// The RDMA devices below a sysfs, by name. Without any the list is empty.
pub fn read_devices(sysfs: &Path) -> Vec<DeviceFacts> {
    let mut devices: Vec<_> = names(&sysfs.join("class/infiniband"))
        .into_iter()
        .map(|name| read_device(&sysfs.join("class/infiniband").join(&name), name))
        .collect();
    devices.sort_by(|one, other| one.name.cmp(&other.name));
    devices
}

fn read_device(directory: &Path, name: String) -> DeviceFacts {
    let mut ports: Vec<_> = names(&directory.join("ports"))
        .iter()
        .filter_map(|number| read_port(&directory.join("ports").join(number), number.parse().ok()?))
        .collect();
    ports.sort_by_key(|port| port.number);
    let device = directory.join("device");
    DeviceFacts { name, pcie_path: pcie_path(&device), numa_node: numa_node(&device), ports }
}

fn read_port(directory: &Path, number: u8) -> Option<PortFacts> {
    // Such as `4: ACTIVE`.
    let is_active = line(&directory.join("state"))?.starts_with("4:");
    let link_layer = match line(&directory.join("link_layer"))?.as_str() {
        "InfiniBand" => LinkLayer::InfiniBand,
        "Ethernet" => LinkLayer::Ethernet,
        _ => return None,
    };
    let mut gids: Vec<_> = names(&directory.join("gids"))
        .iter()
        .filter_map(|index| read_gid(directory, index.parse().ok()?))
        .collect();
    gids.sort_by_key(|gid| gid.index);
    Some(PortFacts { number, is_active, link_layer, gids })
}

/// An entry of the table; an unused one is no address.
fn read_gid(port: &Path, index: u8) -> Option<Gid> {
    let address: Ipv6Addr = line(&port.join(format!("gids/{index}")))?.parse().ok()?;
    let kind = line(&port.join(format!("gid_attrs/types/{index}")));
    let kind = match kind.as_deref() {
        Some("RoCE v2") => GidKind::Udp,
        _ => GidKind::First,
    };
    // The last 64 bits of an InfiniBand address name the port; an unused entry has none.
    (address.to_bits() & u128::from(u64::MAX) != 0).then_some(Gid { index, address, kind })
}

/// The path of a device in the PCIe tree, from its directory or a link to it.
pub(super) fn pcie_path(device: &Path) -> Vec<String> {
    let Ok(real) = device.canonicalize() else {
        return Vec::new();
    };
    let parts = real.iter().map(|part| part.to_string_lossy().into_owned());
    parts.skip_while(|part| !part.starts_with("pci")).collect()
}

/// The NUMA node of a device. The kernel writes -1 where there is none.
pub(super) fn numa_node(device: &Path) -> Option<u32> {
    line(&device.join("numa_node"))?.parse().ok()
}

/// The directory of the device at a PCI address, such as `0000:01:00.0` in any case.
pub(super) fn pci_device(sysfs: &Path, address: &str) -> PathBuf {
    sysfs.join("bus/pci/devices").join(address.to_ascii_lowercase())
}

fn names(directory: &Path) -> Vec<String> {
    // A directory that is absent or cannot be read has no entries: the device is not usable.
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn line(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}
