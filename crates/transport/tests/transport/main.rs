//! Connections over TCP, TLS and shared memory: conformance, faults, and peers that lie.

mod faults;
mod given_up;
mod kernel_tls;
mod liar;
mod lies;
mod listener;
mod partial_answers;
mod proofs;
mod proxy;
mod questions;
mod reconnect;
mod small_reads;
mod stream;
mod streams;
mod tls;
mod user_token;
