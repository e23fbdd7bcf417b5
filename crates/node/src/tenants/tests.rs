//! Tests of tenants: identity, isolation, quotas, forgetting.

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use cascade_block::{BlockKey, Manifest, Namespace, TenantSecret};
use cascade_store::{FilesConfig, Put, PutOutcome, ViewOutcome};

use super::*;
use crate::config::{AdminGroup, TenantConfig};

const OWN: u32 = 500;
const MIB: u64 = 1 << 20;
const BLOCK: usize = 64 << 10;

fn secret_file(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

fn store(directory: &Path, name: &str) -> StoreConfig {
    let files = FilesConfig {
        capacity_bytes: 32 * MIB,
        segment_bytes: 2 * MIB,
        ..FilesConfig::new(directory.join("files").join(name))
    };
    StoreConfig {
        pipeline: "Dram|Files".to_owned(),
        dram_bytes: 8 * MIB,
        huge_pages: false,
        files: Some(files),
        ..StoreConfig::default()
    }
}

fn tenant(directory: &Path, name: &str, users: &[u32], token: Option<&str>) -> TenantConfig {
    TenantConfig {
        name: name.to_owned(),
        users: users.to_vec(),
        token_file: token.map(|text| secret_file(directory, &format!("{name}.token"), text)),
        store: store(directory, name),
        encryption_key_file: None,
    }
}

fn config(directory: &Path, tenants: Vec<TenantConfig>) -> NodeConfig {
    NodeConfig {
        store: store(directory, DEFAULT_TENANT),
        tenants,
        ..NodeConfig::new(directory.join("socket"))
    }
}

fn keys(range: std::ops::Range<u64>) -> Vec<BlockKey> {
    let namespace = Namespace::new(Manifest::new(), &TenantSecret::new("the same for all"));
    range.map(|n| namespace.key_of_id(&n.to_le_bytes())).collect()
}

/// Bytes of a block of a tenant; both tenants use the same keys for other bytes.
fn bytes_of(tenant: &str, key: &BlockKey) -> Vec<u8> {
    let seed = key.as_bytes().iter().chain(tenant.as_bytes()).fold(7_u64, |sum, byte| {
        sum.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(u64::from(*byte) + 1)
    });
    let mut bytes = vec![0; BLOCK];
    let mut word = seed | 1;
    for into in bytes.as_chunks_mut().0 {
        *into = (word ^ (word >> 31)).to_le_bytes();
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    }
    bytes
}

fn fill(tenant: &Tenant, range: std::ops::Range<u64>) {
    for key in keys(range) {
        let bytes = bytes_of(tenant.name(), &key);
        let outcome = tenant.store().put(&[Put::new(key, &bytes)], CallOptions::default());
        assert!(matches!(outcome[0], PutOutcome::Stored), "{outcome:?}");
    }
    tenant.store().flush(CallOptions::default()).unwrap();
}

/// The number of hits. Checks every byte.
fn hits(tenant: &Tenant, range: std::ops::Range<u64>) -> usize {
    let hit = |key: &BlockKey| match tenant.store().view(&[*key], CallOptions::default()).remove(0)
    {
        ViewOutcome::Hit { slab, .. } => {
            assert!(
                slab.host().expect("host memory") == &bytes_of(tenant.name(), key)[..],
                "{} got wrong bytes",
                tenant.name()
            );
            true
        }
        _ => false,
    };
    keys(range).iter().filter(|key| hit(key)).count()
}

fn contains(bytes: &[u8], pattern: &[u8]) -> bool {
    bytes.windows(pattern.len()).any(|window| window == pattern)
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

/// The places that contain a pattern: `memory` (the pool's file, read as another process would) and
/// the paths of files.
fn places_with(tenant: &Tenant, pattern: &[u8]) -> Vec<String> {
    let region = tenant.store().region();
    let mut memory = vec![0; region.bytes()];
    region.host().expect("host memory").file().read_exact_at(&mut memory, 0).unwrap();
    let in_memory = contains(&memory, pattern).then(|| "memory".to_owned());
    let directory = &tenant.store().config().files.as_ref().unwrap().directory;
    let has_pattern = |path: &PathBuf| contains(&fs::read(path).unwrap(), pattern);
    let in_files = files_below(directory).into_iter().filter(has_pattern);
    in_memory.into_iter().chain(in_files.map(|path| path.display().to_string())).collect()
}

/// A pool file with a name cannot be sealed: another user with its descriptor could truncate it and
/// crash the node with SIGBUS.
#[test]
fn only_the_default_tenant_has_a_pool_that_can_be_truncated() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path(), vec![tenant(directory.path(), "a", &[1001], None)]);
    config.pool_directory = Some(directory.path().to_owned());
    assert!(pool_file(&config, DEFAULT_TENANT).is_some());
    let tenants = Tenants::open_for(&config, OWN).unwrap();
    let foreign = tenants.by_name("a").unwrap().store();
    assert_eq!(foreign.config().pool_file, None);
    foreign
        .region()
        .host()
        .expect("host memory")
        .file()
        .set_len(0)
        .expect_err("the pool is sealed");
}

#[test]
fn a_peer_is_identified_by_its_token_or_by_its_user() {
    let directory = tempfile::tempdir().unwrap();
    let token = "0123456789abcdef-a";
    let config = config(
        directory.path(),
        vec![
            tenant(directory.path(), "a", &[1001], Some(&format!("{token}\n"))),
            tenant(directory.path(), "b", &[1002, 1003], None),
        ],
    );
    let tenants = Tenants::open_for(&config, OWN).unwrap();
    let name = |user, token: Option<&str>| {
        tenants.identify(user, token.map(str::as_bytes)).map(|tenant| tenant.name().to_owned())
    };
    assert_eq!(name(OWN, None).unwrap(), DEFAULT_TENANT);
    assert_eq!(name(1001, None).unwrap(), "a");
    assert_eq!(name(1003, None).unwrap(), "b");
    assert_eq!(name(OWN, Some(token)).unwrap(), "a", "the token takes precedence");
    assert_eq!(name(4242, Some(token)).unwrap(), "a");
    assert_eq!(name(1002, Some("0123456789abcdef-x")), Err(Refusal::Token), "never ignored");
    assert_eq!(name(OWN, Some("")), Err(Refusal::Token));
    for user in [0, 4242] {
        let refusal = name(user, None).unwrap_err().to_string();
        assert!(refusal.contains(&format!("users = [{user}]")), "{refusal}");
    }
}

/// `sudo cascade status` was refused by a node of another user.
#[test]
fn root_and_the_admin_group_administer_the_node_and_others_only_their_tenant() {
    let directory = tempfile::tempdir().unwrap();
    let token = "0123456789abcdef-a";
    let mut config =
        config(directory.path(), vec![tenant(directory.path(), "a", &[1001], Some(token))]);
    config.admin_group = Some(AdminGroup { gid: 700, members: vec![1005] });
    let tenants = Tenants::open_for(&config, OWN).unwrap();
    let name = |user, group, token: Option<&str>| {
        let token = token.map(str::as_bytes);
        let tenant = tenants.identify_administrator(user, group, token);
        tenant.map(|tenant| tenant.name().to_owned())
    };
    for (user, group) in [(0, 0), (OWN, 100), (1005, 100), (4242, 700), (1001, 700)] {
        assert_eq!(name(user, group, None).unwrap(), DEFAULT_TENANT, "user {user}, group {group}");
    }
    assert_eq!(name(1001, 100, None).unwrap(), "a");
    assert_eq!(name(0, 0, Some(token)).unwrap(), "a", "the token takes precedence");
    assert_eq!(name(0, 0, Some("0123456789abcdef-x")), Err(Refusal::Token));
    let refusal = name(4242, 100, None).unwrap_err().to_string();
    assert!(refusal.contains("4242") && refusal.contains("admin_group"), "{refusal}");
    assert!(tenants.identify(0, None).is_err(), "root belongs to no tenant: it reads no blocks");
}

#[test]
fn ambiguous_tenants_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let refusal = |tenants| {
        let error = Tenants::open_for(&config(at, tenants), OWN).unwrap_err();
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        format!("{error} {}", cause.unwrap_or_default())
    };
    let token = "a token that is long enough";
    let two = |one: TenantConfig, other: TenantConfig| refusal(vec![one, other]);
    let text = two(tenant(at, "a", &[7], None), tenant(at, "b", &[7], None));
    assert!(text.contains("user 7"), "{text}");
    let text = refusal(vec![tenant(at, "a", &[OWN], None)]);
    assert!(text.contains("user 500") && text.contains(DEFAULT_TENANT), "{text}");
    let text = two(tenant(at, "a", &[], Some(token)), tenant(at, "b", &[], Some(token)));
    assert!(text.contains("same token"), "{text}");
    let text = two(tenant(at, "a", &[7], None), tenant(at, "a", &[8], None));
    assert!(text.contains("same name"), "{text}");
    let text = refusal(vec![tenant(at, DEFAULT_TENANT, &[8], None)]);
    assert!(text.contains("same name"), "{text}");
    let text = refusal(vec![tenant(at, "a", &[], None)]);
    assert!(text.contains("no client can belong"), "{text}");
    let text = refusal(vec![tenant(at, "a", &[], Some("short"))]);
    assert!(text.contains("openssl rand") && !text.contains("short"), "{text}");
    let same = TenantConfig { store: store(at, DEFAULT_TENANT), ..tenant(at, "a", &[7], None) };
    let text = refusal(vec![same]);
    assert!(text.contains("both have the files directory"), "{text}");
    let exposed = tenant(at, "a", &[], Some(token));
    let path = exposed.token_file.clone().unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
    let text = refusal(vec![exposed]);
    assert!(text.contains("chmod 600"), "{text}");
    assert!(!text.contains(token));
}

#[test]
fn tenants_share_no_blocks_and_a_burst_of_one_evicts_none_of_the_other() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let config = config(at, vec![tenant(at, "a", &[1001], None), tenant(at, "b", &[1002], None)]);
    let tenants = Tenants::open_for(&config, OWN).unwrap();
    let (a, b) = (tenants.by_name("a").unwrap(), tenants.by_name("b").unwrap());
    fill(b, 0..60);
    let before = b.store().locate(&keys(0..60));
    assert_eq!(a.store().contains(&keys(0..60)), [false; 60]);
    assert_eq!(hits(a, 0..60), 0);
    // Far more than the capacity of both tiers.
    fill(a, 0..800);
    assert!(a.store().stats().counters.evicted_blocks > 0);
    assert!(a.store().stats().counters.reclaimed_blocks > 0);
    assert_eq!(b.store().locate(&keys(0..60)), before);
    assert_eq!(hits(b, 0..60), 60);
    assert!(hits(a, 700..800) > 0);
    let pattern = &bytes_of("b", &keys(3..4)[0])[500..532];
    assert!(!places_with(b, pattern).is_empty(), "the search works");
    assert_eq!(places_with(a, pattern), [""; 0], "a can map and open no byte of b");
}

#[test]
fn a_forgotten_tenant_leaves_no_bytes_in_memory_or_files() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let key = secret_file(at, "b.key", &"5a".repeat(32));
    let mut b = tenant(at, "b", &[1002], None);
    b.encryption_key_file = Some(key);
    let config = config(at, vec![tenant(at, "a", &[1001], None), b]);
    let tenants = Tenants::open_for(&config, OWN).unwrap();
    for name in ["a", "b", DEFAULT_TENANT] {
        let (tenant, other) = (tenants.by_name(name).unwrap(), tenants.by_name("a").unwrap());
        fill(tenant, 0..100);
        let patterns: Vec<_> =
            [1, 50, 98].map(|n| bytes_of(name, &keys(n..n + 1)[0])[64..96].to_vec()).into();
        let is_absent = |pattern: &Vec<u8>| places_with(tenant, pattern).is_empty();
        assert!(!patterns.iter().all(is_absent), "{name}");
        let receipt = tenant.forget(Duration::from_secs(30)).unwrap();
        assert!(receipt.is_complete, "{receipt:?}");
        assert_eq!((receipt.tenant.as_str(), receipt.tiers[1].blocks), (name, 100));
        assert_eq!(receipt.memory.zeroed_bytes, 8 * MIB);
        for pattern in &patterns {
            assert_eq!(places_with(tenant, pattern), [""; 0], "{name}");
        }
        assert_eq!(hits(tenant, 0..100), 0);
        fill(tenant, 0..20);
        assert_eq!(hits(tenant, 0..20), 20, "the tenant can be used again");
        if name != "a" {
            assert_eq!(hits(other, 0..20), 20, "other tenants keep their blocks");
        }
        let text = serde_json::to_string(&receipt).unwrap();
        assert_eq!(serde_json::from_str::<Receipt>(&text).unwrap(), receipt);
    }
}

#[test]
fn a_tenant_may_forget_itself_and_the_default_tenant_any() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let users = [4_000_000_001, 4_000_000_002];
    let config =
        config(at, vec![tenant(at, "a", &users[..1], None), tenant(at, "b", &users[1..], None)]);
    let node = crate::Node::open(config).unwrap();
    let named = |name: &str| Arc::clone(node.tenants().by_name(name).unwrap());
    let forget = |caller: &str, name: &str| {
        let arguments = format!("{{\"tenant\": {name:?}}}");
        crate::admin::answer(&node, &named(caller), "forget", &arguments, Duration::from_secs(30))
    };
    fill(&named("b"), 0..10);
    let refusal = forget("a", "b").unwrap_err();
    assert_eq!(refusal.replace("\"b\"", "\"x\""), forget("a", "x").unwrap_err());
    assert_eq!(hits(&named("b"), 0..10), 10);
    for caller in ["b", DEFAULT_TENANT] {
        let receipt: Receipt = serde_json::from_str(&forget(caller, "b").unwrap()).unwrap();
        assert!(receipt.is_complete && receipt.tenant == "b", "{receipt:?}");
    }
    assert_eq!(hits(&named("b"), 0..10), 0);
    assert!(crate::admin::answer(&node, &named("b"), "forget", "{}", Duration::ZERO).is_err());
}

#[test]
fn a_tenant_may_run_admin_commands_on_itself_only() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let users = [4_000_000_001, 4_000_000_002];
    let config =
        config(at, vec![tenant(at, "a", &users[..1], None), tenant(at, "b", &users[1..], None)]);
    let node = crate::Node::open(config).unwrap();
    let administer = |topic: &str, arguments: &str| {
        let a = Arc::clone(node.tenants().by_name("a").unwrap());
        crate::admin::answer(&node, &a, topic, arguments, Duration::from_secs(30))
    };
    let set = "{\"key\": \"log_filter\", \"value\": \"debug\"}";
    for (topic, arguments) in
        [("config", "{}"), ("config-set", set), ("reload", "{}"), ("drain", "{}")]
    {
        let refusal = administer(topic, arguments).unwrap_err();
        assert!(refusal.contains("is no administrator"), "{topic}: {refusal}");
    }
    fill(node.tenants().by_name("a").unwrap(), 0..3);
    fill(node.tenants().by_name("b").unwrap(), 0..3);
    for topic in ["flush", "clear"] {
        let refusal = administer(topic, "{\"tenant\": \"b\"}").unwrap_err();
        assert!(refusal.contains("no access"), "{topic}: {refusal}");
        administer(topic, "{}").unwrap();
    }
    assert_eq!(hits(node.tenants().by_name("a").unwrap(), 0..3), 0);
    assert_eq!(hits(node.tenants().by_name("b").unwrap(), 0..3), 3);
}
