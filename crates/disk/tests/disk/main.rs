//! The file tier: conformance, crashes, damage, faults, hangs and full disks.

mod child_test;
mod conformance;
mod damage;
mod device_probe;
mod device_slabs;
mod erase;
mod faults;
mod fixtures;
mod foreign_files;
mod full_disk;
mod hangs;
mod kill;
mod model;
mod next_segment;
mod old_layout;
mod registered;
mod resize;
mod shared_bytes;
mod shared_syncs;
mod small_disk;
mod syncs;
mod world;
