//! How this program was built.

use std::sync::{LazyLock, OnceLock};

use cascade_replay::environment::Build;

/// The commit that the program was built from, which only `main.rs` is compiled with.
static COMMIT: OnceLock<&'static str> = OnceLock::new();

static VERSION: LazyLock<String> = LazyLock::new(|| {
    let Build { commit, profile, opt_level, .. } = build();
    let version = env!("CARGO_PKG_VERSION");
    format!("{version} (commit {commit}, {profile}, opt-level {opt_level})")
});

/// Sets the commit, once for the process.
pub(crate) fn set_commit(commit: &'static str) {
    COMMIT.get_or_init(|| commit);
}

/// The commit, or `unknown`.
pub(crate) fn commit() -> &'static str {
    COMMIT.get().copied().unwrap_or("unknown")
}

/// What `--version` prints after the name.
pub(crate) fn version() -> &'static str {
    &VERSION
}

pub(crate) fn build() -> Build {
    Build {
        commit: commit().to_owned(),
        profile: env!("CASCADE_PROFILE").to_owned(),
        opt_level: env!("CASCADE_OPT_LEVEL").to_owned(),
        has_debug_assertions: cfg!(debug_assertions),
    }
}
