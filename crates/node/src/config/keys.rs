//! All keys, in the order in which the documents show them. A new key is one entry here and one
//! line in `build.rs`.
//!
//! A setting has one name: `files_capacity` in the file, `--files-capacity` as a flag,
//! `CASCADE_FILES_CAPACITY` in the environment, and `files_capacity` in Python where an embedded
//! store has it.

use super::key::Key;
use super::value::Kind;

/// The table of settings that an operator does not have to know.
pub(super) const ADVANCED: &str = "advanced";

/// Parts of the file, each with a sentence. The first one has no header.
pub const SECTIONS: &[(&str, &str)] = &[
    ("", "What an operator chooses. These keys stand at the top of the file, above any header."),
    (
        ADVANCED,
        "What hardly anybody has a reason to change. Each key says why; change one only after a \
         measurement.",
    ),
    (
        "tenant",
        "One tenant beside the default one, with a store of its own; `[[tenant]]` may be repeated. \
         What a tenant does not give is as for the default one.",
    ),
];

/// All keys but those of tenants: first the operator's, then the advanced ones.
pub const KEYS: &[Key] = &[
    Key::new("dram", Kind::Size, "Size of the DRAM tier; taken from the machine at start.")
        .default("256MiB")
        .minimum("4MiB")
        .flag("dram"),
    Key::new(
        "files",
        Kind::Path,
        "Directory of the file tier; no other node may use it. There is no file tier without it.",
    )
    .flag("files"),
    Key::new("files_capacity", Kind::Size, "Bytes that the file tier may take.")
        .default_rule("80 % of what is free; 4GiB at most on a tmpfs or a container's layer")
        .minimum("1MiB")
        .flag("files-capacity"),
    Key::new("pipeline", Kind::Text, "Tiers from fast to slow.")
        .default_rule("`Dram|Files` with `files`, else `Dram`")
        .flag("pipeline"),
    Key::new("policy", Kind::Choice(POLICIES), "Which blocks leave DRAM first.")
        .default("prefix-cost")
        .flag("policy"),
    Key::new(
        "write",
        Kind::Choice(&["back", "through"]),
        "Whether a put returns from memory (`back`) or waits for every tier (`through`).",
    )
    .default("back")
    .flag("write"),
    Key::new(
        "durable",
        Kind::Switch,
        "Whether a block counts as stored only once it is on stable storage.",
    )
    .default("false")
    .flag("durable"),
    Key::new(
        "digest",
        Kind::Choice(&["off", "blake3", "sha256"]),
        "Name blocks by content too, so that equal bytes are stored once.",
    )
    .default("off")
    .flag("digest"),
    Key::new(
        "keep_pool",
        Kind::Choice(KEEP_POOL),
        "When the next node finds the pool's blocks again: after a crash, also after a clean \
         shutdown (always), or never; then the pool has no name.",
    )
    .default("after-crash")
    .flag("keep-pool"),
    Key::new("socket", Kind::Path, "The Unix socket for processes of this host.")
        .default_rule(
            "`$XDG_RUNTIME_DIR/cascade.sock`; without it `/run/cascade/cascade.sock` for root and \
             `/tmp/cascade-UID/cascade.sock` for others",
        )
        .flag("socket"),
    Key::new("socket_mode", Kind::Mode, "Permissions of the socket's file.")
        .default("0600")
        .flag("socket-mode"),
    Key::new(
        "admin_group",
        Kind::Text,
        "A group of this host whose members may administer the node, as its own user and root may. \
         The socket belongs to it.",
    )
    .default_rule("none")
    .flag("admin-group"),
    Key::new(
        "listen",
        Kind::Address,
        "The TCP port for everything remote: metrics, health, the status page. No port is opened \
         without it; port 0 lets the system choose.",
    )
    .flag("listen"),
    Key::new(
        "token_file",
        Kind::Path,
        "A file with the token that callers of the TCP port present.",
    )
    .secret()
    .flag("token-file"),
    Key::new("tls_certificate", Kind::Path, "The node's certificate chain (PEM).")
        .flag("tls-certificate"),
    Key::new("tls_private_key", Kind::Path, "The certificate's private key (PEM).")
        .secret()
        .flag("tls-private-key"),
    Key::new(
        "tls_client_ca",
        Kind::Path,
        "The CA certificate for client authentication (PEM): with it, TLS is mutual.",
    )
    .flag("tls-client-ca"),
    Key::new(
        "encryption_key_file",
        Kind::Path,
        "A file with the key that the default tenant's file tier is encrypted with.",
    )
    .secret()
    .flag("encryption-key-file"),
    Key::new("connections_max", Kind::Count, "Connection limit.")
        .default("4096")
        .minimum("1")
        .maximum("1048576")
        .live()
        .flag("connections-max"),
    Key::new(
        "client_share",
        Kind::Percent,
        "Share of a tenant's DRAM that one client may hold leased or reserved.",
    )
    .default("50%")
    .minimum("1%")
    .maximum("100%")
    .live()
    .flag("client-share"),
    Key::new("log_format", Kind::Choice(&["text", "json"]), "Text, or one JSON object a line.")
        .default("text")
        .flag("log-format"),
    Key::new("log_filter", Kind::Text, "What is logged, such as `info` or `cascade_node=debug`.")
        .default("info")
        .live()
        .flag("log-filter"),
    Key::new(
        "traces_endpoint",
        Kind::Url,
        "Where traces go: OTLP over HTTP, such as `http://localhost:4318`.",
    )
    .default_rule("no traces")
    .flag("traces-endpoint"),
    Key::new("huge_pages", Kind::Switch, "Whether to ask for huge pages.")
        .default("true")
        .flag("huge-pages")
        .advanced("The kernel gives ordinary pages where it has no huge ones."),
    Key::new(
        "protected_share",
        Kind::Percent,
        "Share of DRAM that protected prefixes may hold; beyond it further ones are ordinary.",
    )
    .default("90%")
    .maximum("100%")
    .flag("protected-share")
    .advanced("Only stops protected prefixes from filling DRAM; few prefixes are protected."),
    Key::new(
        "pool_directory",
        Kind::Path,
        "Where the pool lies, so that it survives a crash of the node: a tmpfs.",
    )
    .default("/dev/shm")
    .flag("pool-directory")
    .advanced("Every Linux system has this tmpfs."),
    Key::new("files_layout", Kind::Choice(LAYOUTS), "How blocks lie in files.")
        .default("segments")
        .flag("files-layout")
        .advanced("`file-per-block` is for file systems that hosts share by name; it is slower."),
    Key::new("segment_size", Kind::Size, "Size of a segment; space is reclaimed by segments.")
        .default_rule("a sixteenth of `files_capacity`, 1MiB to 256MiB")
        .minimum("1MiB")
        .maximum("1TiB")
        .flag("segment-size")
        .advanced("The default keeps what a reclaim drops below a sixteenth of the tier."),
    Key::new(
        "io_engine",
        Kind::Choice(ENGINES),
        "What reads and writes: `auto` is `uring` where the kernel allows it, else `psync`.",
    )
    .default("auto")
    .flag("io-engine")
    .advanced("`auto` tries the ring at start and falls back by itself."),
    Key::new(
        "direct_io",
        Kind::Switch,
        "Whether to bypass the page cache, where the file system allows it.",
    )
    .default("true")
    .flag("direct-io")
    .advanced("The page cache would keep a second copy of what DRAM keeps."),
    Key::new(
        "admit_partial",
        Kind::Switch,
        "Whether a request's last, partly filled block is taken.",
    )
    .default("false")
    .flag("admit-partial")
    .advanced("A partly filled block is replaced when it fills up: it is rarely hit."),
    Key::new("timeout", Kind::Duration, "How long a call may take unless it says otherwise.")
        .default("30s")
        .minimum("1ms")
        .flag("timeout")
        .advanced("Clients send a timeout with each call; this one is for the node's own calls."),
    Key::new("shutdown_timeout", Kind::Duration, "How long a clean shutdown may take.")
        .default("30s")
        .minimum("1s")
        .live()
        .flag("shutdown-timeout")
        .advanced("Shorter than the 90 s after which systemd kills a service."),
    Key::new(
        "dirty_max",
        Kind::Size,
        "Bytes that may wait to be written down before puts wait too.",
    )
    .default_rule("a quarter of `dram`")
    .minimum("1B")
    .flag("dirty-max")
    .advanced("More would pin DRAM for a slow disk; less would make bursts wait."),
    Key::new(
        "mover_rate",
        Kind::Rate,
        "Bytes a second that may be written to each lower tier, and brought up by prefetch.",
    )
    .default_rule("no limit")
    .minimum("1B/s")
    .flag("mover-rate")
    .advanced("A limit helps only where the disk is shared with other programs."),
    Key::new(
        "changes_max",
        Kind::Count,
        "Changes of what a store has that are kept, while somebody follows them, in 33 bytes each; \
         0 lets nobody follow.",
    )
    .default("1048576")
    .maximum("268435456")
    .flag("changes-max")
    .advanced("A follower that falls behind by more reads the whole set again."),
    Key::new(
        "probe_interval",
        Kind::Duration,
        "Time between two probes of a tier whose circuit is open, or that is idle.",
    )
    .default("5s")
    .minimum("1ms")
    .flag("probe-interval")
    .advanced("A tier that recovers is used again after at most this time."),
    Key::new(
        "probe_timeout",
        Kind::Duration,
        "How long a probe may take; a call that lasts as long counts as a failure.",
    )
    .default("3s")
    .minimum("1ms")
    .flag("probe-timeout")
    .advanced("Far above what a working disk needs."),
    Key::new("failure_window", Kind::Count, "How many of the last calls of a tier count.")
        .default("8")
        .minimum("1")
        .maximum("64")
        .flag("failure-window")
        .advanced("Belongs to `failure_threshold`."),
    Key::new(
        "failure_threshold",
        Kind::Count,
        "So many failures in the window, and the tier's circuit opens; at most the window.",
    )
    .default("2")
    .minimum("1")
    .maximum("64")
    .flag("failure-threshold")
    .advanced("One failure may be chance, two within a few calls are a fault."),
    Key::new("threads_max", Kind::Count, "Threads that serve requests.")
        .default("64")
        .minimum("1")
        .maximum("4096")
        .flag("threads-max")
        .advanced("Threads start only when calls wait for a slow tier."),
];

/// Keys of one tenant.
pub const TENANT_KEYS: &[Key] = &[
    Key::new(
        "tenant.name",
        Kind::Text,
        "Its name in metrics and admin calls: lower-case letters, digits, `-` and `_`.",
    )
    .default_rule("required"),
    Key::new(
        "tenant.users",
        Kind::List,
        "Users of this host, names or numbers, that are this tenant.",
    )
    .default_rule("none"),
    Key::new("tenant.token_file", Kind::Path, "A file with the token that proves this tenant.")
        .secret(),
    Key::new(
        "tenant.encryption_key_file",
        Kind::Path,
        "A file with the key that its file tier is encrypted with.",
    )
    .secret(),
    Key::new("tenant.dram", Kind::Size, "Its quota of DRAM, a pool of its own.")
        .default_rule("`dram`")
        .minimum("4MiB"),
    Key::new("tenant.files", Kind::Path, "Directory of its file tier.")
        .default_rule("`tenants/NAME` below `files`"),
    Key::new("tenant.files_capacity", Kind::Size, "Its quota of the file tier.")
        .default_rule("`files_capacity`")
        .minimum("1MiB"),
];

const POLICIES: &[&str] = &["lru", "s3fifo", "arc", "waterfall", "prefix-cost"];
const KEEP_POOL: &[&str] = &["after-crash", "always", "never"];
const LAYOUTS: &[&str] = &["segments", "file-per-block"];
const ENGINES: &[&str] = &["auto", "uring", "psync"];

/// The key of a path; the path is one of the table's.
pub(super) fn key(path: &str) -> &'static Key {
    let mut all = KEYS.iter().chain(TENANT_KEYS);
    all.find(|key| key.path == path).expect("the table has this path")
}

/// The known name that an unknown one was probably meant to be.
pub(super) fn nearest<'a>(
    unknown: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let ranked = known.into_iter().map(|name| {
        // The right name in the wrong section is nearer than any misspelling.
        let is_same_name = unknown.contains('.') && last(name) == last(unknown);
        (if is_same_name { 0 } else { edits(unknown, name) }, name)
    });
    let best = ranked.min_by_key(|(distance, _)| *distance)?;
    (best.0 <= unknown.chars().count().div_ceil(3)).then_some(best.1)
}

/// Letters to insert, drop or change to make one text the other.
pub(super) fn edits(source: &str, target: &str) -> usize {
    let target: Vec<char> = target.chars().collect();
    let mut row: Vec<usize> = (0..=target.len()).collect();
    for (at, letter) in source.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = at + 1;
        for column in 0..target.len() {
            let change = diagonal + usize::from(letter != target[column]);
            diagonal = row[column + 1];
            row[column + 1] = change.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[target.len()]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_table_is_consistent() {
        let mut seen = BTreeSet::new();
        for key in KEYS.iter().chain(TENANT_KEYS) {
            assert!(seen.insert(key.path), "{} stands twice", key.path);
            let is_tenant = TENANT_KEYS.contains(key);
            assert_eq!(key.section() == "tenant", is_tenant, "{}", key.path);
            let flag = (!is_tenant).then(|| key.path.replace('_', "-"));
            assert_eq!(key.flag, flag.as_deref(), "{}: one name everywhere", key.path);
            assert!(key.reason.is_none_or(|why| why.ends_with('.')), "{}: a sentence", key.path);
            assert!(SECTIONS.iter().any(|(name, _)| *name == key.section()), "{}", key.path);
            assert!(key.meaning.ends_with('.'), "{}: a sentence", key.path);
            for text in [key.default, key.minimum, key.maximum].into_iter().flatten() {
                assert!(key.kind.parse(text).is_ok(), "{}: {text}", key.path);
                assert!(key.parse(text).is_ok(), "{}: {text} is out of bounds", key.path);
            }
        }
    }

    #[test]
    fn an_operator_has_at_most_thirty_settings_to_know() {
        let tenants = TENANT_KEYS.iter().map(Key::name);
        let names: BTreeSet<&str> =
            KEYS.iter().filter(|key| !key.is_advanced()).map(Key::name).chain(tenants).collect();
        assert!(names.len() <= 30, "{}: {names:?}", names.len());
        let advanced_last = KEYS.is_sorted_by_key(Key::is_advanced);
        assert!(advanced_last, "the operator's keys come first");
    }

    #[test]
    fn the_nearest_name_is_found() {
        let paths = || KEYS.iter().map(|key| key.path);
        assert_eq!(nearest("files_capactiy", paths()), Some("files_capacity"));
        assert_eq!(nearest("node.pipeline", paths()), Some("pipeline"));
        assert_eq!(nearest("zzzzzzzzzz", paths()), None);
        assert_eq!(edits("kitten", "sitting"), 3);
    }
}
