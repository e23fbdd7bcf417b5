//! The pool of slabs, in the memory of the host and of devices.

mod device;
mod full_file_system;
mod pool;
mod wipe;
