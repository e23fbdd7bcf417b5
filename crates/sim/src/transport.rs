//! Worlds of the transport: real endpoints on a simulated network, and a model of their memory.

mod client;
mod life;
mod living;
mod passing;
mod process;
mod profile;
mod shared;
mod slot;
mod world;

pub(crate) use world::run;
