//! Keys match their test vectors, and the sources of all crates keep the rules of this repository.

mod circles;
mod keys;
mod layers;
mod methods;
mod sources;
mod tidy;
