//! Passes the profile and the optimisation level to the build, so that figures can be judged. The
//! commit is a variable of the compilation of `main.rs` alone, which takes a second.

#![expect(clippy::disallowed_methods, reason = "cargo passes values in the environment")]

use std::env::var;
use std::path::{Component, Path};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let profile = profile().unwrap_or_else(|| var("PROFILE").unwrap_or_default());
    println!("cargo::rustc-env=CASCADE_PROFILE={profile}");
    println!("cargo::rustc-env=CASCADE_OPT_LEVEL={}", var("OPT_LEVEL").unwrap_or_default());
}

/// The name of the profile's directory, such as `dist`: `PROFILE` says `release` there, too.
fn profile() -> Option<String> {
    let directory = var("OUT_DIR").ok()?;
    let mut parts = Path::new(&directory).components().rev();
    parts.find(|part| *part == Component::Normal("build".as_ref()))?;
    parts.next()?.as_os_str().to_str().map(str::to_owned)
}
