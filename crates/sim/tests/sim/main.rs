//! The simulator: its disk, its worlds, and the bugs that it finds.

mod disk;
mod plants;
mod transport;
mod transport_shares;
mod transport_worlds;
mod worlds;
