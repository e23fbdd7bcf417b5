//! All keys, in the order of the documentation. A new key is one entry here and one line in
//! `build.rs`.
//!
//! A setting has one name: `files_capacity` in the file, `--files-capacity` as a flag,
//! `CASCADE_FILES_CAPACITY` in the environment, and `files_capacity` in Python, for settings of
//! embedded stores.

use strsim::osa_distance;

use super::key::{ADVANCED, SettingKey};
use super::value::ValueKind;

/// Tables of the file, each with a description. The first one is the top level.
pub const SECTIONS: &[(&str, &str)] = &[
    ("", "The settings of a normal setup. They belong at the top of the file, above all tables."),
    (
        ADVANCED,
        "Settings that rarely need to change. Each one says why. Measure before you change one.",
    ),
    (
        "tenant",
        "One tenant with its own store, in addition to the default tenant. Repeat `[[tenant]]` for \
         more. A key that is not set here has the value of the default tenant.",
    ),
];

/// All keys except those of tenants: first the ordinary keys, then the advanced ones.
pub const KEYS: &[SettingKey] = &[
    SettingKey::new(
        "dram",
        ValueKind::Size,
        "Size of the DRAM tier. All of it is allocated at start. A running node can be given less, \
         and up to its size at the start again.",
    )
    .default("256MiB")
    .minimum("4MiB")
    .live()
    .flag("dram"),
    SettingKey::new(
        "files",
        ValueKind::Path,
        "Directory of the file tier. Only one node may use it. Without it there is no file tier.",
    )
    .flag("files"),
    SettingKey::new("files_capacity", ValueKind::Size, "Size limit of the file tier.")
        .default_rule("80 % of the free space; at most 4GiB on a tmpfs or a container layer")
        .minimum("1MiB")
        .live()
        .flag("files-capacity"),
    SettingKey::new(
        "gpu",
        ValueKind::Text,
        "UUID of a GPU, as `cascade doctor` prints it, whose memory holds blocks for processes of \
         this host that use GPUs. With `dram`, a second node for them starts at the socket's path \
         with `.hbm` behind it. Without `dram`, the memory of the GPU takes the place of DRAM.",
    )
    .flag("gpu"),
    SettingKey::new("hbm", ValueKind::Size, "Size of the HBM tier, in the memory of `gpu`.")
        .minimum("4MiB")
        .flag("hbm"),
    SettingKey::new(
        "hbm_reserve",
        ValueKind::Size,
        "Memory of `gpu` that stays free. When less is free, the node of the GPU gives its part \
         back and stops.",
    )
    .default("512MiB")
    .flag("hbm-reserve"),
    SettingKey::new("pipeline", ValueKind::Text, "Tiers from fast to slow.")
        .default_rule(
            "`Dram|Files` with `files`, else `Dram`; with `gpu`, `Hbm|` before it, or `Hbm` in \
             place of `Dram` if `dram` is not set",
        )
        .flag("pipeline"),
    SettingKey::new("policy", ValueKind::Choice(POLICIES), "Eviction policy of DRAM.")
        .default("prefix-cost")
        .flag("policy"),
    SettingKey::new(
        "write",
        ValueKind::Choice(&["back", "through"]),
        "When a put returns: once the block is in DRAM (`back`), or in every tier (`through`).",
    )
    .default("back")
    .flag("write"),
    SettingKey::new(
        "durable",
        ValueKind::Switch,
        "Whether a block counts as stored only after it was synced to stable storage.",
    )
    .default("false")
    .flag("durable"),
    SettingKey::new(
        "digest",
        ValueKind::Choice(&["off", "blake3", "sha256"]),
        "Hash for deduplication: blocks with equal bytes are stored once.",
    )
    .default("off")
    .flag("digest"),
    SettingKey::new(
        "keep_pool",
        ValueKind::Choice(KEEP_POOL),
        "When the next start recovers the blocks in the pool: after a crash, after a crash or a \
         clean shutdown (`always`), or never. With `never` the pool has no file.",
    )
    .default("after-crash")
    .flag("keep-pool"),
    SettingKey::new(
        "socket",
        ValueKind::Path,
        "Path of the Unix socket for processes on this host.",
    )
    .default_rule(
        "`$XDG_RUNTIME_DIR/cascade.sock`; without it `/run/cascade/cascade.sock` for root and \
             `/tmp/cascade-UID/cascade.sock` for others",
    )
    .flag("socket"),
    SettingKey::new("socket_mode", ValueKind::Mode, "Permissions of the socket file.")
        .default("0600")
        .flag("socket-mode"),
    SettingKey::new(
        "admin_group",
        ValueKind::Text,
        "Group of this host whose members may administer the node, like its own user and root. \
         The group owns the socket file.",
    )
    .default_rule("none")
    .flag("admin-group"),
    SettingKey::new(
        "listen",
        ValueKind::Address,
        "TCP address for HTTP: metrics, health and the status page. Without it no port is opened. \
         Port 0 chooses a free port.",
    )
    .flag("listen"),
    SettingKey::new(
        "token_file",
        ValueKind::Path,
        "File with the token that clients of the TCP port must present.",
    )
    .secret()
    .flag("token-file"),
    SettingKey::new("tls_certificate", ValueKind::Path, "Certificate chain of the node (PEM).")
        .flag("tls-certificate"),
    SettingKey::new("tls_private_key", ValueKind::Path, "Private key of the certificate (PEM).")
        .secret()
        .flag("tls-private-key"),
    SettingKey::new(
        "tls_client_ca",
        ValueKind::Path,
        "CA certificate for client authentication (PEM). With it, TLS is mutual.",
    )
    .flag("tls-client-ca"),
    SettingKey::new(
        "cluster",
        ValueKind::Text,
        "The nodes whose DRAM this node reads from: `hosts:FILE`, a list with a line `NAME \
         HOST:PORT` for each node.",
    )
    .flag("cluster"),
    SettingKey::new(
        "peer_token_file",
        ValueKind::Path,
        "File with the token that all nodes of `cluster` know. It does not encrypt.",
    )
    .secret()
    .flag("peer-token-file"),
    SettingKey::new(
        "encryption_key_file",
        ValueKind::Path,
        "File with the encryption key of the default tenant's file tier.",
    )
    .secret()
    .flag("encryption-key-file"),
    SettingKey::new("connections_max", ValueKind::Count, "Connection limit.")
        .default("4096")
        .minimum("1")
        .maximum("1048576")
        .live()
        .flag("connections-max"),
    SettingKey::new(
        "client_share",
        ValueKind::Percent,
        "Share of a tenant's DRAM that one client may hold under lease or reserved.",
    )
    .default("50%")
    .minimum("1%")
    .maximum("100%")
    .live()
    .flag("client-share"),
    SettingKey::new(
        "log_format",
        ValueKind::Choice(&["text", "json"]),
        "Format of the log: text, or one JSON object per line.",
    )
    .default("text")
    .flag("log-format"),
    SettingKey::new(
        "log_filter",
        ValueKind::Text,
        "Log filter, such as `info` or `cascade_node=debug`.",
    )
    .default("info")
    .live()
    .flag("log-filter"),
    SettingKey::new(
        "traces_endpoint",
        ValueKind::Url,
        "OTLP endpoint for traces, over HTTP, such as `http://localhost:4318`.",
    )
    .default_rule("no traces")
    .flag("traces-endpoint"),
    SettingKey::new("huge_pages", ValueKind::Switch, "Whether to request huge pages for the pool.")
        .default("true")
        .flag("huge-pages")
        .advanced("Without free huge pages, the kernel uses ordinary ones."),
    SettingKey::new(
        "protected_share",
        ValueKind::Percent,
        "Share of DRAM that protected prefixes may hold. Above it, prefixes are not protected.",
    )
    .default("90%")
    .maximum("100%")
    .flag("protected-share")
    .advanced("It only keeps protected prefixes from filling DRAM, and few are protected."),
    SettingKey::new(
        "pool_directory",
        ValueKind::Path,
        "Directory of the pool file, which survives a crash of the node. Use a tmpfs.",
    )
    .default("/dev/shm")
    .flag("pool-directory")
    .advanced("Every Linux system has this tmpfs."),
    SettingKey::new("segment_size", ValueKind::Size, "Size of a segment, the unit of reclaim.")
        .default_rule("a sixteenth of `files_capacity`, 1MiB to 256MiB")
        .minimum("1MiB")
        .maximum("1TiB")
        .flag("segment-size")
        .advanced("With the default, a reclaim drops at most a sixteenth of the tier."),
    SettingKey::new(
        "io_engine",
        ValueKind::Choice(ENGINES),
        "I/O engine of the file tier. `auto` is `uring` if the kernel allows it, else `psync`.",
    )
    .default("auto")
    .flag("io-engine")
    .advanced("`auto` tests `io_uring` at start, and falls back to `psync`."),
    SettingKey::new(
        "direct_io",
        ValueKind::Switch,
        "Whether to bypass the page cache, if the file system allows it.",
    )
    .default("true")
    .flag("direct-io")
    .advanced("The page cache would keep a second copy of blocks that are in DRAM."),
    SettingKey::new(
        "admit_partial",
        ValueKind::Switch,
        "Whether to admit the last block of a request when it is only partly filled.",
    )
    .default("false")
    .flag("admit-partial")
    .advanced("A partly filled block is replaced once it is full, so it is rarely hit."),
    SettingKey::new(
        "timeout",
        ValueKind::Duration,
        "Time limit of a call that has none of its own.",
    )
    .default("30s")
    .minimum("1ms")
    .flag("timeout")
    .advanced("Clients send a time limit with each call. This one is for internal calls."),
    SettingKey::new("shutdown_timeout", ValueKind::Duration, "Time limit of a clean shutdown.")
        .default("30s")
        .minimum("1s")
        .live()
        .flag("shutdown-timeout")
        .advanced("The default is below the 90 s after which systemd kills a service."),
    SettingKey::new(
        "dirty_max",
        ValueKind::Size,
        "Limit of the bytes that wait to be written to lower tiers. At the limit, puts wait.",
    )
    .default_rule("a quarter of `dram`")
    .minimum("1B")
    .flag("dirty-max")
    .advanced("A higher limit pins more DRAM for a slow disk, a lower one delays bursts."),
    SettingKey::new(
        "mover_rate",
        ValueKind::Rate,
        "Limit of the write rate to each lower tier, and of the read rate of prefetch.",
    )
    .default_rule("no limit")
    .minimum("1B/s")
    .flag("mover-rate")
    .advanced("A limit helps only if other programs use the same disk."),
    SettingKey::new(
        "changes_max",
        ValueKind::Count,
        "Length of the change log that followers of a store read, at 33 bytes per change. It is \
         kept only while there is a follower. With 0 there are no followers.",
    )
    .default("1048576")
    .maximum("268435456")
    .flag("changes-max")
    .advanced("A follower with a longer backlog reads the whole set of keys again."),
    SettingKey::new(
        "probe_interval",
        ValueKind::Duration,
        "Time between two probes of a tier that is idle or whose circuit is open.",
    )
    .default("5s")
    .minimum("1ms")
    .flag("probe-interval")
    .advanced("A tier that recovers is used again after at most this time."),
    SettingKey::new(
        "probe_timeout",
        ValueKind::Duration,
        "Time limit of a probe. A call that takes longer counts as a failure.",
    )
    .default("3s")
    .minimum("1ms")
    .flag("probe-timeout")
    .advanced("The default is far above the latency of a working disk."),
    SettingKey::new(
        "failure_window",
        ValueKind::Count,
        "Number of recent calls to a tier that are counted.",
    )
    .default("8")
    .minimum("1")
    .maximum("64")
    .flag("failure-window")
    .advanced("It only matters together with `failure_threshold`."),
    SettingKey::new(
        "failure_threshold",
        ValueKind::Count,
        "Failures within the window that open the tier's circuit. At most `failure_window`.",
    )
    .default("2")
    .minimum("1")
    .maximum("64")
    .flag("failure-threshold")
    .advanced("One failure may be chance. Two within a few calls are a fault."),
    SettingKey::new("threads_max", ValueKind::Count, "Limit of the threads that serve requests.")
        .default("64")
        .minimum("1")
        .maximum("4096")
        .flag("threads-max")
        .advanced("Threads are started only when calls wait for a slow tier."),
    SettingKey::new(
        "node_name",
        ValueKind::Text,
        "The name of this node in the list of `cluster`.",
    )
    .default_rule("the name of the host")
    .flag("node-name")
    .advanced("The list has the names of the hosts in most clusters."),
    SettingKey::new(
        "peer_listen",
        ValueKind::Address,
        "TCP address where this node answers the others of `cluster`.",
    )
    .default_rule("its address in the list")
    .flag("peer-listen")
    .advanced("The address in the list is that of the host in most networks."),
    SettingKey::new(
        "peer_tls_certificate",
        ValueKind::Path,
        "Certificate chain of this node for the others (PEM). With the next two, TLS between nodes \
         is mutual.",
    )
    .flag("peer-tls-certificate")
    .advanced("A token is enough where nobody else can read the network."),
    SettingKey::new(
        "peer_tls_private_key",
        ValueKind::Path,
        "Private key of that certificate (PEM).",
    )
    .secret()
    .flag("peer-tls-private-key")
    .advanced("It belongs to `peer_tls_certificate`."),
    SettingKey::new(
        "peer_tls_ca",
        ValueKind::Path,
        "CA certificate that signs those of all nodes (PEM).",
    )
    .flag("peer-tls-ca")
    .advanced("It belongs to `peer_tls_certificate`."),
];

/// Keys of one tenant.
pub const TENANT_KEYS: &[SettingKey] = &[
    SettingKey::new(
        "tenant.name",
        ValueKind::Text,
        "Name in metrics and admin commands: lower-case letters, digits, `-` and `_`.",
    )
    .default_rule("required"),
    SettingKey::new(
        "tenant.users",
        ValueKind::List,
        "Users of this host that belong to this tenant, by name or UID.",
    )
    .default_rule("none"),
    SettingKey::new(
        "tenant.token_file",
        ValueKind::Path,
        "File with the token that authenticates clients as this tenant.",
    )
    .secret(),
    SettingKey::new(
        "tenant.encryption_key_file",
        ValueKind::Path,
        "File with the encryption key of the tenant's file tier.",
    )
    .secret(),
    SettingKey::new(
        "tenant.dram",
        ValueKind::Size,
        "DRAM quota, which is the size of the tenant's own pool.",
    )
    .default_rule("`dram`")
    .minimum("4MiB"),
    SettingKey::new("tenant.files", ValueKind::Path, "Directory of the tenant's file tier.")
        .default_rule("`tenants/NAME` below `files`"),
    SettingKey::new("tenant.files_capacity", ValueKind::Size, "File tier quota.")
        .default_rule("`files_capacity`")
        .minimum("1MiB"),
];

const POLICIES: &[&str] = &["lru", "s3fifo", "arc", "waterfall", "prefix-cost"];
const KEEP_POOL: &[&str] = &["after-crash", "always", "never"];
const ENGINES: &[&str] = &["auto", "uring", "psync"];

/// The key with this path, which must be in one of the tables.
pub(super) fn key(path: &str) -> &'static SettingKey {
    let mut all = KEYS.iter().chain(TENANT_KEYS);
    all.find(|key| key.path == path).expect("the table has this path")
}

/// The known name nearest to an unknown one, if at most a third of the letters differ.
pub(super) fn nearest_name<'a>(
    unknown: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let ranked = known.into_iter().map(|name| {
        // The right name in the wrong section is nearer than any misspelling.
        let is_same_name = unknown.contains('.') && last(name) == last(unknown);
        (if is_same_name { 0 } else { osa_distance(unknown, name) }, name)
    });
    let best = ranked.min_by_key(|(distance, _)| *distance)?;
    (best.0 <= unknown.chars().count().div_ceil(3)).then_some(best.1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_tables_of_keys_are_consistent() {
        let mut seen = BTreeSet::new();
        for key in KEYS.iter().chain(TENANT_KEYS) {
            assert!(seen.insert(key.path), "{} is listed twice", key.path);
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
    fn at_most_thirty_settings_are_not_advanced() {
        let tenants = TENANT_KEYS.iter().map(SettingKey::name);
        let names: BTreeSet<&str> = KEYS
            .iter()
            .filter(|key| !key.is_advanced())
            .map(SettingKey::name)
            .chain(tenants)
            .collect();
        assert!(names.len() <= 30, "{}: {names:?}", names.len());
        let advanced_last = KEYS.is_sorted_by_key(SettingKey::is_advanced);
        assert!(advanced_last, "advanced keys come last");
    }

    #[test]
    fn the_nearest_name_is_found() {
        let paths = || KEYS.iter().map(|key| key.path);
        assert_eq!(nearest_name("files_capactiy", paths()), Some("files_capacity"));
        assert_eq!(nearest_name("node.pipeline", paths()), Some("pipeline"));
        assert_eq!(nearest_name("zzzzzzzzzz", paths()), None);
    }
}
