//! Locks, threads and time, of the machine and of simulated worlds.

mod calls;
mod outside;
mod worlds;
