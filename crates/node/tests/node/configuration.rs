//! The configuration: sources, error messages, and the pages generated from the table of keys.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use cascade_node::NodeConfig;
use cascade_node::config::{
    self, AvailableSpace, ConfigError, ConfigSources, Environment, KEYS, KeepPool, SettingKey,
    TENANT_KEYS, ValueKind, difference,
};
use cascade_node::doctor::FileSystem;
use proptest::prelude::*;
use tempfile::TempDir;

const USER: u32 = 1000;
/// The free space of every directory in these tests.
const ROOM: AvailableSpace =
    AvailableSpace { file_system: FileSystem(0xef53), free_bytes: 2 << 40, own_bytes: 0 };

/// One configuration file in a directory of its own. `HERE` in the text is replaced by its path.
struct Case {
    directory: TempDir,
    variables: Vec<(&'static str, String)>,
    flags: Vec<(&'static SettingKey, String)>,
}

impl Case {
    fn new(text: &str) -> Self {
        let directory = TempDir::new().unwrap();
        let text = text.replace("HERE", &directory.path().display().to_string());
        fs::write(directory.path().join("cascade.toml"), text).unwrap();
        Self { directory, variables: Vec::new(), flags: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn variable(mut self, name: &'static str, value: &str) -> Self {
        self.variables.push((name, value.to_owned()));
        self
    }

    fn flag(mut self, path: &str, value: &str) -> Self {
        let key = KEYS.iter().find(|key| key.path == path).unwrap();
        self.flags.push((key, value.to_owned()));
        self
    }

    fn secret(self, name: &str, mode: u32) -> Self {
        fs::write(self.path(name), "0123456789abcdef0123456789abcdef").unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(mode)).unwrap();
        self
    }

    fn load(&self) -> Result<NodeConfig, ConfigError> {
        let mut environment = Environment::new(self.variables.clone(), USER);
        environment.passwd = self.path("passwd");
        environment.available_space = |_| Ok(ROOM);
        let file = Some(self.path("cascade.toml"));
        config::load(&ConfigSources { file, flags: self.flags.clone() }, &environment)
    }

    fn refusal(&self) -> String {
        self.load().unwrap_err().to_string()
    }
}

fn without_file() -> NodeConfig {
    config::load(&ConfigSources::default(), &Environment::new([("A", "")], USER)).unwrap()
}

/// The configuration without the sources of its settings.
fn without_sources(mut config: NodeConfig) -> NodeConfig {
    config.settings = config::Settings::default();
    config
}

#[test]
fn the_defaults_of_the_table_are_those_of_the_code() {
    let mut expected = NodeConfig::new("/tmp/cascade-1000/cascade.sock");
    // The code has no default for these two.
    expected.pool_directory = Some("/dev/shm".into());
    expected.log.filter = Some("info".to_owned());
    assert_eq!(without_sources(without_file()), expected);
}

#[test]
fn later_sources_take_precedence_key_by_key() {
    let text = "dram = \"1GiB\"\npolicy = \"lru\"\n\nconnections_max = 10\n";
    let case = Case::new(text)
        .variable("CASCADE_DRAM", "2GiB")
        .variable("CASCADE_POLICY", "arc")
        .flag("dram", "3GiB");
    let config = case.load().unwrap();
    assert_eq!(config.store.dram_bytes, 3 << 30);
    assert_eq!(config.store.policy, cascade_store::PolicyKind::Arc);
    assert_eq!(config.limits.connections_max, 10);
    let printed = config.settings.print();
    for line in [
        "dram = \"3GiB\"|--dram",
        "policy = \"arc\"|CASCADE_POLICY",
        "connections_max = 10|cascade.toml:4",
        "huge_pages = true|# default",
        "# listen =|not set",
    ] {
        let (start, end) = line.split_once('|').unwrap();
        let found = printed.lines().any(|text| text.starts_with(start) && text.contains(end));
        assert!(found, "{line}\n{printed}");
    }
}

#[test]
fn a_printed_configuration_reads_back_as_the_same() {
    let case = Case::new(
        "files = \"/srv/a \\\"b\\\"\"\n[advanced]\nmover_rate = \"5MB/s\"\n\
         [[tenant]]\nname = \"a\"\nusers = [7, \"9\"]\ndram = \"8MiB\"\n",
    );
    let config = case.load().unwrap();
    let again = Case::new(&config.settings.print()).load().unwrap();
    assert_eq!(config, again);
}

#[test]
fn the_file_may_be_named_by_the_environment() {
    let case = Case::new("dram = \"1GiB\"\n");
    let file = case.path("cascade.toml").display().to_string();
    let environment = Environment::new([("CASCADE_CONFIG", file)], USER);
    let config = config::load(&ConfigSources::default(), &environment).unwrap();
    assert_eq!(config.store.dram_bytes, 1 << 30);
    let missing = Environment::new([("CASCADE_CONFIG", "/no/such/file.toml")], USER);
    let error = config::load(&ConfigSources::default(), &missing).unwrap_err().to_string();
    assert!(error.contains("/no/such/file.toml"), "{error}");
}

fn assert_refused(cases: &[(&str, &[&str])]) {
    for (text, hints) in cases {
        let error = Case::new(text).refusal();
        for hint in *hints {
            assert!(error.contains(hint), "{text:?} should name {hint:?}: {error}");
        }
    }
}

#[test]
fn unknown_keys_and_invalid_values_are_reported_with_their_place() {
    assert_refused(&[
        ("\n\nfiles_capactiy = 1", &["cascade.toml:3", "files_capactiy", "\"files_capacity\""]),
        ("[advancde]\ntimeout = 1", &["cascade.toml:1", "\"advancde\"", "\"advanced\""]),
        ("[advanced]\npolicy = \"lru\"", &["cascade.toml:2", "policy", "top of the file"]),
        ("huge_pages = true", &["cascade.toml:1", "huge_pages", "below [advanced]"]),
        ("advanced = 1", &["cascade.toml:1", "[advanced]"]),
        ("capacity = \"1GiB\"", &["cascade.toml:1", "\"capacity\""]),
        ("dram = \"lots\"", &["cascade.toml:1", "dram", "512MiB"]),
        ("dram = 1.5", &["cascade.toml:1", "\"1.5\"", "512MiB"]),
        ("dram = \"1MiB\"", &["dram", "the minimum is 4MiB"]),
        ("[advanced]\nprotected_share = 101", &["protected_share", "the maximum is 100%"]),
        ("policy = true", &["policy", "prefix-cost"]),
        ("[advanced]\ntimeout = \"soon\"", &["timeout", "250ms"]),
        ("socket_mode = 600", &["socket_mode", "\"0600\""]),
        ("socket = \"run/c.sock\"", &["socket", "absolute"]),
        ("[dram\n", &["cascade.toml:1"]),
        ("[dram]\ncapacity = \"1GiB\"", &["cascade.toml:1", "dram"]),
        ("dram = \"1GiB\"\ndram = \"2GiB\"", &["cascade.toml:2", "duplicate"]),
        ("[tenant]\nname = \"a\"", &["cascade.toml:1", "[[tenant]]"]),
        ("[[tenant]]\nname = \"a\"\nquota = 1", &["cascade.toml:3", "tenant.quota"]),
        ("[[tenant]]\nname = \"a\"\nfiles = \"32MiB\"", &["tenant.files", "absolute path"]),
    ]);
    let error = Case::new("").variable("CASCADE_DRAMM", "1GiB").refusal();
    assert!(error.contains("did you mean \"CASCADE_DRAM\""), "{error}");
    let error = Case::new("").variable("CASCADE_DRAM", "big").refusal();
    assert!(error.contains("CASCADE_DRAM: dram"), "{error}");
    let error = Case::new("").flag("dram", "big").refusal();
    assert!(error.contains("--dram: dram"), "{error}");
}

#[test]
fn durations_sizes_and_shares_are_read_in_every_form() {
    let text = "dram = 16777216\n[advanced]\ntimeout = 2.5\nshutdown_timeout = 7\n\
                probe_interval = \"250ms\"\nprotected_share = 25\nmover_rate = 1048576\n";
    let config = Case::new(text).load().unwrap();
    assert_eq!(config.store.dram_bytes, 16 << 20);
    assert_eq!(config.store.timeout.as_millis(), 2500);
    assert_eq!(config.shutdown_timeout.as_secs(), 7);
    assert_eq!(config.store.health.probe_interval.as_millis(), 250);
    assert_eq!(config.store.protected_percent, 25);
    assert_eq!(config.store.mover_bytes_per_second, Some(1 << 20));
}

#[test]
fn contradictions_are_reported_with_their_keys() {
    assert_refused(&[
        ("pipeline = \"Dram|Files\"", &["pipeline", "cascade.toml:1", "--files"]),
        ("pipeline = \"Dram\"\nfiles = \"/a\"", &["files (", "Files"]),
        ("pipeline = \"Dram|Tape\"", &["pipeline", "Tape"]),
        ("[advanced]\ndirty_max = \"1GiB\"", &["dirty_max", "dram"]),
        (
            "files = \"/a\"\nfiles_capacity = \"1GiB\"\n[advanced]\nsegment_size = \"1GiB\"",
            &["segment_size", "files_capacity", "two segments"],
        ),
        ("listen = \"0.0.0.0:9000\"", &["listen", "token_file"]),
        ("listen = \"[::]:9000\"", &["listen", "127.0.0.1"]),
        ("tls_certificate = \"/a\"", &["tls_private_key"]),
        ("tls_client_ca = \"/a\"", &["tls_certificate"]),
        ("encryption_key_file = \"HERE/cascade.toml\"", &["encryption_key_file"]),
        ("[[tenant]]\nname = \"default\"\nusers = [1]", &["tenant.name", "default"]),
        ("[[tenant]]\nname = \"../a\"\nusers = [1]", &["tenant.name", "../a"]),
        ("[[tenant]]\nusers = [1]", &["tenant.name"]),
        ("[[tenant]]\nname = \"a\"", &["tenant.users", "tenant.token_file"]),
        (
            "[[tenant]]\nname = \"a\"\nusers = [1]\n[[tenant]]\nname = \"b\"\nusers = [1]",
            &["user 1", "\"a\"", "\"b\""],
        ),
        (
            "files = \"/x\"\n[[tenant]]\nname = \"a\"\nusers = [1]\nfiles = \"/x\"",
            &["/x", "\"default\"", "\"a\""],
        ),
        ("[[tenant]]\nname = \"a\"\nusers = [\"nobody-here\"]", &["nobody-here", "id -u"]),
        ("admin_group = \"nobody-here\"", &["cascade.toml:1", "admin_group", "getent"]),
    ]);
    let long = format!("socket = \"/{}\"", "s".repeat(107));
    assert!(Case::new(&long).refusal().contains("107"));
}

#[test]
fn a_port_beyond_loopback_needs_a_token() {
    let text = "listen = \"0.0.0.0:9000\"\ntoken_file = \"HERE/token\"\n";
    let config = Case::new(text).secret("token", 0o600).load().unwrap();
    assert_eq!(config.listen.unwrap().port(), 9000);
    assert!(Case::new("listen = \"127.0.0.1:9000\"").load().is_ok());
    assert!(Case::new("listen = \"[::1]:9000\"").load().is_ok());
}

#[test]
fn secrets_that_others_can_use_are_refused() {
    for (head, key) in [("", "token_file"), ("[[tenant]]\nname = \"a\"", "tenant.token_file")] {
        let text = format!("{head}\ntoken_file = \"HERE/token\"\n");
        for mode in [0o644, 0o604, 0o660, 0o620] {
            let error = Case::new(&text).secret("token", mode).refusal();
            assert!(error.contains(key) && error.contains("chmod 600"), "{mode:o}: {error}");
        }
        for mode in [0o600, 0o400, 0o640] {
            assert!(Case::new(&text).secret("token", mode).load().is_ok(), "{mode:o}");
        }
        let error = Case::new(&text).refusal();
        assert!(error.contains("cannot be read"), "{error}");
    }
    let inside = "files = \"HERE\"\nencryption_key_file = \"HERE/key\"\n";
    let error = Case::new(inside).secret("key", 0o600).refusal();
    assert!(error.contains("inside the directory that it encrypts"), "{error}");
}

#[test]
fn a_tenant_has_a_store_of_its_own() {
    let case = Case::new(
        "dram = \"1GiB\"\npolicy = \"lru\"\nfiles = \"/srv/c\"\n\
         [[tenant]]\nname = \"research\"\nusers = [\"alice\", 1005]\ndram = \"64MiB\"\n\
         files_capacity = \"32MiB\"\n[[tenant]]\nname = \"other\"\nusers = [7]\n",
    );
    fs::write(case.path("passwd"), "root:x:0:0::/:\nalice:x:1001:100:A:/home/a:/bin/sh\n").unwrap();
    let config = case.load().unwrap();
    let [research, other] = &config.tenants[..] else { panic!("two tenants") };
    assert_eq!(research.users, [1001, 1005]);
    assert_eq!(research.store.dram_bytes, 64 << 20);
    assert_eq!(research.store.policy, cascade_store::PolicyKind::Lru);
    let files = research.store.files.as_ref().unwrap();
    assert_eq!(files.directory, Path::new("/srv/c/tenants/research"));
    assert_eq!((files.capacity_bytes, files.segment_bytes), (32 << 20, 2 << 20));
    assert_eq!(other.store.dram_bytes, 1 << 30);
    assert_eq!(config.store.dram_bytes, 1 << 30);
}

/// The command in the README created a file tier of 4 GiB on a disk of 2 TiB.
#[test]
fn a_file_tier_without_a_capacity_gets_a_share_of_its_disk() {
    let capacity = |text: &str| {
        let config = Case::new(text).load().unwrap();
        let files = |store: &cascade_store::StoreConfig| store.files.clone().unwrap();
        let tenants = config.tenants.iter().map(|it| files(&it.store).capacity_bytes >> 30);
        let own = files(&config.store);
        assert!(own.segment_bytes == 256 << 20, "{own:?}");
        let sizes: Vec<u64> = [own.capacity_bytes >> 30].into_iter().chain(tenants).collect();
        (sizes, config.settings)
    };
    let files = "files = \"/nvme/cascade\"\n";
    let (sizes, settings) = capacity(files);
    assert_eq!(sizes, [1638]);
    let (bytes, reason) = settings.derived_files_capacity().unwrap();
    assert_eq!(bytes >> 30, 1638);
    assert!(reason.contains("80 %") && reason.contains("/nvme/cascade"), "{reason}");
    let shown = settings.print();
    assert!(shown.contains("files_capacity = \"1638GiB\"") && shown.contains(reason), "{shown}");
    let (sizes, settings) = capacity(&format!("{files}files_capacity = \"99GiB\"\n"));
    assert_eq!((sizes, settings.derived_files_capacity()), (vec![99], None));
    let tenants = "[[tenant]]\nname = \"a\"\nusers = [1]\n[[tenant]]\nname = \"b\"\n\
                   users = [2]\nfiles_capacity = \"638GiB\"\n";
    let (sizes, _) = capacity(&format!("{files}{tenants}"));
    assert_eq!(sizes, [500, 500, 638], "two tenants share what the third one's capacity leaves");
}

/// A capacity derived from free space differs at every reload.
#[test]
fn a_derived_capacity_is_not_a_change_of_the_configuration() {
    let case = Case::new("files = \"/nvme/cascade\"\n");
    let old = case.load().unwrap();
    let mut environment = Environment::new([("A", "")], USER);
    environment.available_space = |_| Ok(AvailableSpace { free_bytes: 1 << 40, ..ROOM });
    let file = Some(case.path("cascade.toml"));
    let new = config::load(&ConfigSources { file, flags: Vec::new() }, &environment).unwrap();
    assert_ne!(old.store.files, new.store.files);
    assert_eq!(difference(&old, &new), config::ConfigDifference::default());
}

#[test]
fn a_pool_that_is_not_kept_has_no_directory() {
    let config = Case::new("keep_pool = \"never\"").load().unwrap();
    assert_eq!((config.keep_pool, config.pool_directory), (KeepPool::Never, None));
    let config = Case::new("[advanced]\npool_directory = \"/mnt/pool\"").load().unwrap();
    assert_eq!(config.pool_directory, Some("/mnt/pool".into()));
}

/// A value of a key that differs from its default, as TOML.
fn other_value(key: &SettingKey) -> String {
    let text = match key.kind {
        ValueKind::Choice(choices) => {
            *choices.iter().find(|choice| Some(**choice) != key.default).unwrap()
        }
        ValueKind::Switch if key.default == Some("true") => return "false".to_owned(),
        ValueKind::Switch => return "true".to_owned(),
        ValueKind::Count => return "5".to_owned(),
        ValueKind::List => return "[4711]".to_owned(),
        ValueKind::Path => "HERE/secret",
        ValueKind::Size => "8MiB",
        ValueKind::Rate => "3MiB/s",
        ValueKind::Duration => "7s",
        ValueKind::Percent => "42%",
        ValueKind::Mode => "0666",
        ValueKind::Address => "127.0.0.1:9000",
        ValueKind::Url => "http://localhost:4318",
        ValueKind::Text if key.path == "pipeline" => "Files",
        ValueKind::Text if key.path == "admin_group" => "700",
        ValueKind::Text if key.path == "cluster" => "hosts:/srv/hosts",
        ValueKind::Text => "debug",
    };
    format!("{text:?}")
}

/// Loads lines of TOML. The returned text has `HERE` in place of the directory, which differs from
/// case to case.
fn load_lines(lines: &[(&str, String)]) -> (NodeConfig, String) {
    let mut sections: Vec<&str> = lines.iter().map(|(section, _)| *section).collect();
    sections.sort_unstable();
    sections.dedup();
    let mut text = String::new();
    for section in sections {
        text.push_str(if section == "tenant" { "[[tenant]]\n" } else { "" });
        let ours = lines.iter().filter(|(other, _)| *other == section);
        let is_headed = section.is_empty() || section == "tenant";
        let prefix = if is_headed { String::new() } else { format!("{section}.") };
        text.extend(ours.map(|(_, line)| format!("{prefix}{line}\n")));
    }
    let case = Case::new(&text).secret("secret", 0o600).secret("other", 0o600);
    let config = case.load().unwrap();
    let shown = format!("{:?}", without_sources(config.clone()));
    (config, shown.replace(&case.directory.path().display().to_string(), "HERE"))
}

/// A key that the node does not read would be accepted without effect.
#[test]
fn every_key_has_an_effect() {
    for key in KEYS {
        // Settings that other keys require.
        let mut required = vec![
            ("", "files = \"/srv/cascade\""),
            ("", "tls_certificate = \"/srv/certificate\""),
            ("", "tls_private_key = \"HERE/other\""),
        ];
        // They exclude others, so only their own tests have them.
        if ["gpu", "hbm"].contains(&key.path) {
            required.extend([("", "gpu = \"GPU-0\""), ("", "hbm = \"16MiB\"")]);
        }
        if ["cluster", "node_name"].contains(&key.path) || key.path.starts_with("peer_") {
            required.extend([
                ("", "cluster = \"hosts:HERE/hosts\""),
                ("advanced", "peer_tls_certificate = \"HERE/certificate\""),
                ("advanced", "peer_tls_private_key = \"HERE/other\""),
                ("advanced", "peer_tls_ca = \"HERE/ca\""),
            ]);
        }
        let before: Vec<_> =
            required.iter().map(|(section, line)| (*section, (*line).to_owned())).collect();
        required.retain(|(section, line)| {
            *section != key.section() || !line.starts_with(&format!("{} =", key.name()))
        });
        let mut after: Vec<_> =
            required.iter().map(|(section, line)| (*section, (*line).to_owned())).collect();
        after.push((key.section(), format!("{} = {}", key.name(), other_value(key))));
        let ((old, old_shown), (new, new_shown)) = (load_lines(&before), load_lines(&after));
        assert_ne!(old_shown, new_shown, "{} changes nothing", key.path);
        let changes = difference(&old, &new);
        let list = if key.is_live { changes.live } else { changes.restart };
        assert!(list.contains(&key.path.to_owned()), "{}: {list:?}", key.path);
    }
}

#[test]
fn every_tenant_key_has_an_effect() {
    let required = [("name", "\"a\"".to_owned()), ("users", "[1]".to_owned())];
    let lines = |keys: &[(&'static str, String)]| {
        let mut lines = vec![("", "files = \"/srv/cascade\"".to_owned())];
        lines.extend(keys.iter().map(|(name, value)| ("tenant", format!("{name} = {value}"))));
        load_lines(&lines).1
    };
    for key in TENANT_KEYS {
        let mut changed = required.to_vec();
        changed.retain(|(name, _)| *name != key.name());
        changed.push((key.name(), other_value(key)));
        assert_ne!(lines(&required), lines(&changed), "{} changes nothing", key.path);
    }
}

#[test]
fn a_reload_lists_live_changes_and_those_that_need_a_restart() {
    let old = Case::new("connections_max = 10\n[[tenant]]\nname = \"a\"\nusers = [1]\n");
    let new = Case::new(
        "connections_max = 20\ndram = \"1GiB\"\nsocket = \"/run/other.sock\"\n\
         [[tenant]]\nname = \"b\"\nusers = [1]\n",
    );
    let (old, new) = (old.load().unwrap(), new.load().unwrap());
    let changes = difference(&old, &new);
    assert_eq!(changes.live, ["dram", "connections_max"]);
    assert_eq!(changes.restart, ["socket", "tenant \"b\" (new)", "tenant \"a\" (removed)"]);
    assert_eq!(difference(&old, &old), config::ConfigDifference::default());
}

proptest! {
    #[test]
    fn any_file_is_read_or_refused(
        section in "[a-z]{0,9}|advanced|files|limits|tenant",
        name in "[a-z_]{0,9}|dram|segment_size|timeout|users",
        value in "\\PC{0,24}|[0-9]{1,25}|\"[0-9]{1,22}[KMGT]i?B\"|\\[[0-9,\"a]{0,9}\\]",
    ) {
        for text in [
            format!("[{section}]\n{name} = {value}\n"),
            format!("[[{section}]]\n{name} = {value}\n"),
            format!("{section} = {value}\n{name}"),
        ] {
            // An accepted configuration is printed so that it reads back as the same.
            if let Ok(config) = Case::new(&text).load() {
                let again = Case::new(&config.settings.print()).load().unwrap();
                prop_assert_eq!(config, again);
            }
        }
    }

    #[test]
    fn a_value_of_a_key_reads_back(index in 0..KEYS.len(), text in "[0-9]{1,8}(MiB|s|%|MB/s)?") {
        let key = &KEYS[index];
        if let Ok(value) = key.parse(&text) {
            prop_assert_eq!(key.parse(&value.text()), Ok(value));
        }
    }
}

#[test]
fn the_example_file_has_the_defaults() {
    let example = config::example();
    let config = Case::new(&example).load().unwrap();
    assert_eq!(without_sources(config), without_sources(without_file()));
    for key in KEYS.iter().chain(TENANT_KEYS) {
        assert!(example.contains(&format!("{} =", key.name())), "{}", key.path);
    }
    assert_current("packaging/cascade.toml", &example);
}

#[test]
fn the_reference_page_is_current() {
    assert_current("docs/configuration.md", &config::reference());
}

fn assert_current(path: &str, expected: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    if fs::read_to_string(&file).is_ok_and(|found| found == expected) {
        return;
    }
    let name = Path::new(path).file_name().unwrap();
    let fresh = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&fresh, expected).unwrap();
    panic!("{path} is out of date; copy {} over it", fresh.display());
}
