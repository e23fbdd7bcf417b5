//! Binds the fake's own references to its functions: with the driver of a GPU in the same process,
//! which exports the same names, its table would otherwise have that driver's functions.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rerun-if-changed=build.rs");
}
