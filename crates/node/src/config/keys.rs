//! All keys, in the order in which the documents show them. A new key is one entry here and one
//! line in `build.rs`.

use super::key::Key;
use super::value::Kind;

/// Sections, each with a sentence.
pub const SECTIONS: &[(&str, &str)] = &[
    ("node", "Where the node listens, and how it ends."),
    ("security", "Who may use the TCP port, and what protects the bytes."),
    ("dram", "The DRAM tier: the pool that every client of this host maps."),
    ("files", "The file tier. It is there when a directory is given."),
    ("store", "How tiers work together."),
    (
        "health",
        "When a tier below DRAM is shed: it fails too often, and is left alone until it recovers.",
    ),
    ("limits", "What clients may take."),
    ("log", "What is written to standard error."),
    ("traces", "OpenTelemetry traces."),
    (
        "tenant",
        "One tenant beside the default one, with a store of its own; `[[tenant]]` may be repeated. \
         What a tenant does not give is as for the default one.",
    ),
];

/// All keys but those of tenants.
pub const KEYS: &[Key] = &[
    Key::new("node.socket", Kind::Path, "The Unix socket for processes of this host.")
        .default_rule(
            "`$XDG_RUNTIME_DIR/cascade.sock`; without it `/run/cascade/cascade.sock` for root and \
             `/tmp/cascade-UID/cascade.sock` for others",
        )
        .flag("socket"),
    Key::new("node.socket_mode", Kind::Mode, "Permissions of the socket's file.").default("0600"),
    Key::new(
        "node.admin_group",
        Kind::Text,
        "A group of this host whose members may administer the node, as its own user and root may. \
         The socket belongs to it.",
    )
    .default_rule("none"),
    Key::new(
        "node.listen",
        Kind::Address,
        "The TCP port for everything remote: metrics, health, the status page. No port is opened \
         without it; port 0 lets the system choose.",
    )
    .flag("listen"),
    Key::new("node.shutdown_timeout", Kind::Duration, "How long a clean shutdown may take.")
        .default("30s")
        .minimum("1s")
        .live(),
    Key::new(
        "security.token_file",
        Kind::Path,
        "A file with the token that callers of the TCP port present.",
    )
    .secret()
    .flag("token-file"),
    Key::new("security.certificate", Kind::Path, "The node's certificate chain (PEM)."),
    Key::new("security.private_key", Kind::Path, "The certificate's private key (PEM).").secret(),
    Key::new(
        "security.client_authority",
        Kind::Path,
        "Who signs certificates of callers (PEM): with it, TLS is mutual.",
    ),
    Key::new(
        "security.encryption_key_file",
        Kind::Path,
        "A file with the key that the default tenant's file tier is encrypted with.",
    )
    .secret(),
    Key::new(
        "dram.capacity",
        Kind::Size,
        "Size of the DRAM tier; taken from the machine at start.",
    )
    .default("256MiB")
    .minimum("4MiB")
    .flag("dram"),
    Key::new("dram.huge_pages", Kind::Switch, "Whether to ask for huge pages.").default("true"),
    Key::new("dram.policy", Kind::Choice(POLICIES), "Which blocks leave DRAM first.")
        .default("prefix-cost")
        .flag("policy"),
    Key::new(
        "dram.protected",
        Kind::Percent,
        "Share of DRAM that protected prefixes may hold; beyond it further ones are ordinary.",
    )
    .default("90%")
    .maximum("100%"),
    Key::new(
        "dram.pool_directory",
        Kind::Path,
        "Where the pool lies, so that it survives a crash of the node: a tmpfs.",
    )
    .default("/dev/shm"),
    Key::new(
        "dram.keep_pool",
        Kind::Choice(KEEP_POOL),
        "When the next node finds the pool's blocks again: after a crash, also after a clean \
         shutdown (always), or never; then the pool has no name.",
    )
    .default("after-crash"),
    Key::new("files.directory", Kind::Path, "Where the files lie; no other node may use it.")
        .flag("files"),
    Key::new("files.capacity", Kind::Size, "Bytes that the file tier may take.")
        .default_rule("80 % of what is free; 4GiB at most on a tmpfs or a container's layer")
        .minimum("1MiB")
        .flag("files-capacity"),
    Key::new("files.layout", Kind::Choice(LAYOUTS), "How blocks lie in files.").default("segments"),
    Key::new("files.segment", Kind::Size, "Size of a segment, of which space comes back at once.")
        .default_rule("a sixteenth of the capacity, 1MiB to 256MiB")
        .minimum("1MiB")
        .maximum("1TiB"),
    Key::new(
        "files.engine",
        Kind::Choice(ENGINES),
        "What reads and writes: `auto` is `uring` where the kernel allows it, else `psync`.",
    )
    .default("auto"),
    Key::new(
        "files.direct",
        Kind::Switch,
        "Whether to pass by the page cache, where the file system allows it.",
    )
    .default("true"),
    Key::new(
        "files.durable",
        Kind::Switch,
        "Whether a block counts as stored only once it is on stable storage.",
    )
    .default("false"),
    Key::new("store.pipeline", Kind::Text, "Tiers from fast to slow.")
        .default_rule("`Dram|Files` with `files.directory`, else `Dram`")
        .flag("pipeline"),
    Key::new(
        "store.write",
        Kind::Choice(&["back", "through"]),
        "Whether a put returns from memory (`back`) or waits for every tier (`through`).",
    )
    .default("back")
    .flag("write"),
    Key::new(
        "store.digest",
        Kind::Choice(&["off", "blake3", "sha256"]),
        "Name blocks by content too, so that equal bytes are stored once.",
    )
    .default("off")
    .flag("digest"),
    Key::new(
        "store.admit_partial",
        Kind::Switch,
        "Whether a request's last, partly filled block is taken.",
    )
    .default("false"),
    Key::new("store.timeout", Kind::Duration, "How long a call may take unless it says otherwise.")
        .default("30s")
        .minimum("1ms"),
    Key::new(
        "store.dirty_max",
        Kind::Size,
        "Bytes that may wait to be written down before puts wait too.",
    )
    .default_rule("a quarter of `dram.capacity`")
    .minimum("1B"),
    Key::new(
        "store.mover_rate",
        Kind::Rate,
        "Bytes a second that may be written to each lower tier, and brought up by prefetch.",
    )
    .default_rule("no limit")
    .minimum("1B/s"),
    Key::new(
        "store.changes_max",
        Kind::Count,
        "Changes of what a store has that are kept, while somebody follows them, in 33 bytes each; \
         0 lets nobody follow.",
    )
    .default("1048576")
    .maximum("268435456"),
    Key::new(
        "health.probe_interval",
        Kind::Duration,
        "Time between two probes of a tier that is shed, or that has had nothing to do.",
    )
    .default("5s")
    .minimum("1ms"),
    Key::new(
        "health.probe_timeout",
        Kind::Duration,
        "How long a probe may take; a call that lasts as long counts as a failure.",
    )
    .default("3s")
    .minimum("1ms"),
    Key::new("health.window", Kind::Count, "How many of the last calls count.")
        .default("8")
        .minimum("1")
        .maximum("64"),
    Key::new(
        "health.threshold",
        Kind::Count,
        "So many failures among them, and the tier is shed; at most the window.",
    )
    .default("2")
    .minimum("1")
    .maximum("64"),
    Key::new("limits.connections", Kind::Count, "Connections at a time.")
        .default("4096")
        .minimum("1")
        .maximum("1048576")
        .live(),
    Key::new(
        "limits.client_share",
        Kind::Percent,
        "Share of a tenant's DRAM that one client may hold leased or reserved.",
    )
    .default("50%")
    .minimum("1%")
    .maximum("100%")
    .live(),
    Key::new("limits.threads", Kind::Count, "Threads that serve requests.")
        .default("64")
        .minimum("1")
        .maximum("4096"),
    Key::new("log.format", Kind::Choice(&["text", "json"]), "Text, or one JSON object a line.")
        .default("text")
        .flag("log-format"),
    Key::new("log.filter", Kind::Text, "What is logged, such as `info` or `cascade_node=debug`.")
        .default("info")
        .live()
        .flag("log-filter"),
    Key::new(
        "traces.endpoint",
        Kind::Url,
        "Where traces go: OTLP over HTTP, such as `http://localhost:4318`.",
    )
    .default_rule("no traces"),
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
        .default_rule("`dram.capacity`")
        .minimum("4MiB"),
    Key::new("tenant.files", Kind::Size, "Its quota of the file tier.")
        .default_rule("`files.capacity`")
        .minimum("1MiB"),
    Key::new("tenant.files_directory", Kind::Path, "Directory of its file tier.")
        .default_rule("`tenants/NAME` below `files.directory`"),
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
fn edits(source: &str, target: &str) -> usize {
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
            assert!(seen.insert(key.flag.unwrap_or(key.path)) || key.flag.is_none());
            let is_tenant = TENANT_KEYS.contains(key);
            assert_eq!(key.section() == "tenant", is_tenant, "{}", key.path);
            assert!(SECTIONS.iter().any(|(name, _)| *name == key.section()), "{}", key.path);
            assert!(key.meaning.ends_with('.'), "{}: a sentence", key.path);
            for text in [key.default, key.minimum, key.maximum].into_iter().flatten() {
                assert!(key.kind.parse(text).is_ok(), "{}: {text}", key.path);
                assert!(key.parse(text).is_ok(), "{}: {text} is out of bounds", key.path);
            }
        }
    }

    #[test]
    fn the_nearest_name_is_found() {
        let paths = || KEYS.iter().map(|key| key.path);
        assert_eq!(nearest("dram.capactiy", paths()), Some("dram.capacity"));
        assert_eq!(nearest("node.pipeline", paths()), Some("store.pipeline"));
        assert_eq!(nearest("dram.zzzzzzzz", paths()), None);
        assert_eq!(edits("kitten", "sitting"), 3);
    }
}
