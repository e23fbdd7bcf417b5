//! The pool of slabs, in the memory of the host and of devices.

mod device;
mod pool;
mod wipe;
