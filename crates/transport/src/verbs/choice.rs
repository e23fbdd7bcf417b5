//! Which device is nearest to a GPU or to a CPU, and which GID of a port is used. Pure, except that
//! a target is looked up in sysfs.

use std::path::Path;

use super::error::Unavailable;
use super::settings::VerbsSettings;
use super::sysfs::{self, DeviceFacts, Gid, GidKind, LinkLayer, PortFacts};

/// What a device should be near to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Target {
    /// Its path in the PCIe tree; empty for memory of the host.
    pub pcie_path: Vec<String>,
    /// Its NUMA node.
    pub numa_node: Option<u32>,
}

impl Target {
    /// A GPU, by its PCI address.
    pub fn gpu(sysfs: &Path, address: &str) -> Self {
        // CUDA writes the domain with eight digits, the kernel with four.
        let address = match address.split_once(':') {
            Some((domain, rest)) if domain.len() > 4 => {
                format!("{}:{rest}", &domain[domain.len() - 4..])
            }
            _ => address.to_owned(),
        };
        let device = sysfs::pci_device(sysfs, &address);
        Self { pcie_path: sysfs::pcie_path(&device), numa_node: sysfs::numa_node(&device) }
    }

    /// Memory of a NUMA node.
    pub fn memory(numa_node: u32) -> Self {
        Self { pcie_path: Vec::new(), numa_node: Some(numa_node) }
    }
}

/// How near a device is. A nearer one is less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// Below the same PCIe bridge. The number is larger for fewer bridges in common.
    Bridge(usize),
    /// At the same root of a PCIe tree.
    Root,
    /// At the same NUMA node.
    NumaNode,
    /// At another NUMA node, or the machine does not say where.
    Far,
}

/// More bridges than any path has.
const BRIDGES_MAX: usize = 64;

fn nearness(device: &DeviceFacts, target: &Target) -> Nearness {
    let pairs = device.pcie_path.iter().zip(&target.pcie_path);
    match pairs.take_while(|(one, other)| one == other).count() {
        0 if device.numa_node.is_some() && device.numa_node == target.numa_node => {
            Nearness::NumaNode
        }
        0 => Nearness::Far,
        1 => Nearness::Root,
        common => Nearness::Bridge(BRIDGES_MAX.saturating_sub(common)),
    }
}

/// The devices nearest to a target that have an active port: all equally near ones, by name.
///
/// # Errors
/// If a device that the settings name is absent, or no device has an active port.
pub fn nearest<'a>(
    devices: &'a [DeviceFacts],
    target: &Target,
    settings: &VerbsSettings,
) -> Result<Vec<&'a DeviceFacts>, Unavailable> {
    let present = || devices.iter().map(|device| device.name.clone()).collect();
    for name in &settings.devices {
        if !devices.iter().any(|device| device.name == *name) {
            return Err(Unavailable::NoSuchDevice { name: name.clone(), present: present() });
        }
    }
    let is_named = |name: &String| settings.devices.is_empty() || settings.devices.contains(name);
    let named: Vec<_> = devices.iter().filter(|device| is_named(&device.name)).collect();
    let first = named.first().ok_or(Unavailable::NoDevice)?;
    let is_active = |device: &&&DeviceFacts| device.ports.iter().any(|port| port.is_active);
    let usable: Vec<_> = named.iter().filter(is_active).copied().collect();
    let best = usable.iter().map(|device| nearness(device, target)).min();
    let best = best.ok_or_else(|| Unavailable::NoPort { device: first.name.clone() })?;
    Ok(usable.into_iter().filter(|device| nearness(device, target) == best).collect())
}

/// The GID that packets of a port carry: the one that the settings name, else RoCE v2 before v1,
/// and IPv4 before IPv6 before link-local addresses.
pub fn choose_gid(port: &PortFacts, index: Option<u8>) -> Option<Gid> {
    if let Some(index) = index {
        return port.gids.iter().copied().find(|gid| gid.index == index);
    }
    // The GID at index 0 is the port's own; InfiniBand packets use local IDs in one subnet.
    if port.link_layer == LinkLayer::InfiniBand {
        return port.gids.first().copied();
    }
    port.gids.iter().copied().min_by_key(|gid| {
        let is_local = gid.address.segments()[0] == 0xfe80;
        (gid.kind != GidKind::Udp, gid.ipv4().is_none(), is_local, gid.index)
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::super::sysfs::read_devices;
    use super::*;

    /// Writes a device of a fake sysfs. Its GIDs are (address, type).
    fn device(root: &Path, name: &str, pcie: &str, numa: &str, gids: &[(&str, &str)]) {
        let class = root.join("class/infiniband").join(name);
        let port = class.join("ports/1");
        for directory in ["gids", "gid_attrs/types"] {
            fs::create_dir_all(port.join(directory)).unwrap();
        }
        fs::write(port.join("state"), "4: ACTIVE\n").unwrap();
        fs::write(port.join("link_layer"), "Ethernet\n").unwrap();
        for (index, (gid, kind)) in gids.iter().enumerate() {
            fs::write(port.join(format!("gids/{index}")), format!("{gid}\n")).unwrap();
            if !kind.is_empty() {
                fs::write(port.join(format!("gid_attrs/types/{index}")), format!("{kind}\n"))
                    .unwrap();
            }
        }
        if !pcie.is_empty() {
            let address = pci(root, pcie, numa);
            symlink(root.join("bus/pci/devices").join(address), class.join("device")).unwrap();
        }
    }

    /// Writes a PCI device; returns its address.
    fn pci<'a>(root: &Path, path: &'a str, numa: &str) -> &'a str {
        let real = root.join("devices").join(path);
        fs::create_dir_all(&real).unwrap();
        fs::write(real.join("numa_node"), format!("{numa}\n")).unwrap();
        let address = path.rsplit('/').next().unwrap();
        let links = root.join("bus/pci/devices");
        fs::create_dir_all(&links).unwrap();
        symlink(real, links.join(address)).unwrap();
        address
    }

    const NONE: (&str, &str) = ("0000:0000:0000:0000:0000:0000:0000:0000", "");
    const LOCAL: &str = "fe80:0000:0000:0000:0a00:27ff:fe4e:66a1";
    const GLOBAL: &str = "fd09:0000:0000:0000:0000:0000:0000:0001";
    const FOUR: &str = "0000:0000:0000:0000:0000:ffff:0a09:0001";

    fn names(found: &[&DeviceFacts]) -> Vec<String> {
        found.iter().map(|device| device.name.clone()).collect()
    }

    #[test]
    fn the_nearest_device_is_found_by_the_pcie_tree_and_not_by_its_number() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let gids = [(FOUR, "RoCE v2")];
        // Names in an order that has nothing to do with the tree.
        device(root, "mlx5_0", "pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:01.0", "1", &gids);
        device(root, "mlx5_1", "pci0000:00/0000:00:02.0/0000:05:00.0", "0", &gids);
        device(root, "mlx5_2", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:03:00.0", "0", &gids);
        device(root, "mlx5_3", "pci0000:20/0000:20:01.0/0000:21:00.0", "0", &gids);
        device(root, "rxe0", "", "", &gids);
        // One PCIe switch (0000:01:00.0) with mlx5_2, the same root as mlx5_1.
        pci(root, "pci0000:00/0000:00:01.0/0000:01:00.0/0000:04:00.0", "0");
        pci(root, "pci0000:40/0000:40:01.0/0000:41:00.0", "0");
        pci(root, "pci0000:90/0000:90:01.0/0000:91:00.0", "3");
        let devices = read_devices(root);
        let settings = VerbsSettings::default();
        let near = |target: &Target| names(&nearest(&devices, target, &settings).unwrap());
        assert_eq!(near(&Target::gpu(root, "00000000:04:00.0")), ["mlx5_2"]);
        // Another root of the same NUMA node: three are equally near.
        let beside = Target::gpu(root, "0000:41:00.0");
        assert_eq!(near(&beside), ["mlx5_1", "mlx5_2", "mlx5_3"]);
        assert_eq!(near(&Target::memory(1)), ["mlx5_0"]);
        // Nothing is near: all are equally far, and none is taken for near by its missing node.
        assert_eq!(near(&Target::gpu(root, "0000:91:00.0")).len(), 5);
        let named =
            VerbsSettings { devices: vec!["mlx5_1".into(), "mlx5_3".into()], ..settings.clone() };
        let target = Target::gpu(root, "0000:04:00.0");
        assert_eq!(names(&nearest(&devices, &target, &named).unwrap()), ["mlx5_1"]);
    }

    #[test]
    fn a_device_without_an_active_port_is_not_used() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let settings = VerbsSettings::default();
        let target = Target::default();
        assert_eq!(
            nearest(&read_devices(root), &target, &settings).unwrap_err(),
            Unavailable::NoDevice
        );
        device(root, "a", "pci0000:00/0000:00:01.0", "0", &[(FOUR, "RoCE v2")]);
        device(root, "b", "pci0000:01/0000:01:01.0", "0", &[(FOUR, "RoCE v2")]);
        fs::write(root.join("class/infiniband/a/ports/1/state"), "1: DOWN\n").unwrap();
        let devices = read_devices(root);
        assert_eq!(names(&nearest(&devices, &target, &settings).unwrap()), ["b"]);
        let named = VerbsSettings { devices: vec!["a".into()], ..settings.clone() };
        let error = nearest(&devices, &target, &named).unwrap_err();
        assert_eq!(error, Unavailable::NoPort { device: "a".into() });
        let named = VerbsSettings { devices: vec!["c".into()], ..settings };
        let error = nearest(&devices, &target, &named).unwrap_err();
        assert_eq!(error.to_string(), "there is no RDMA device c; there are: a, b");
    }

    #[test]
    fn the_gid_of_an_ipv4_address_with_udp_packets_is_preferred() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let gids = [
            (LOCAL, "IB/RoCE v1"),
            (LOCAL, "RoCE v2"),
            NONE,
            (FOUR, "IB/RoCE v1"),
            (GLOBAL, "RoCE v2"),
            (FOUR, "RoCE v2"),
        ];
        device(root, "mlx5_0", "pci0000:00/0000:00:01.0", "0", &gids);
        let devices = read_devices(root);
        let mut port = devices[0].ports[0].clone();
        assert_eq!(port.gids.len(), 5, "an unused entry is no address");
        let mut order = Vec::new();
        while let Some(gid) = choose_gid(&port, None) {
            order.push(gid.index);
            port.gids.retain(|it| it.index != gid.index);
        }
        assert_eq!(order, [5, 4, 1, 3, 0]);
        let port = &devices[0].ports[0];
        assert_eq!(choose_gid(port, Some(3)).unwrap().index, 3);
        assert_eq!(choose_gid(port, Some(2)), None, "an unused entry");
        assert_eq!(choose_gid(port, None).unwrap().ipv4().unwrap().to_string(), "10.9.0.1");
    }
}
