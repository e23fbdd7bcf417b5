//! Which tenants a client sees: by the user id of its socket, by token, and without either.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cascade_block::BlockKey;
use cascade_node::config::{SecurityConfig, TenantConfig};
use cascade_node::status::{ALL_TENANTS, Status, StatusView};
use cascade_store::{CallOptions, Put, Request, StoreConfig};
use rustix::process::Uid;

use super::served::{Answer, Served, get, get_as_user};

const BOB: u32 = 4711;
const FOREIGN_USER: u32 = 4712;
const TOKEN_OF_BOB: &str = "the-token-of-bob-and-nobody-else";
/// The paths that show data of tenants.
const PATHS: [&str; 4] = ["/", "/live", "/status.json", "/metrics"];

fn key(tag: u8, number: u64) -> BlockKey {
    let mut bytes = [tag; 32];
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    BlockKey::from_bytes(bytes)
}

/// The first hexadecimal digits of a tenant's keys.
fn digits(tag: u8) -> String {
    format!("{tag:02x}").repeat(8)
}

fn secret(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// A node with the tenants `default` and `bobs-lab`, each with hot prefixes.
fn start(secrets: &Path) -> Served {
    let bob = TenantConfig {
        name: "bobs-lab".to_owned(),
        users: vec![BOB],
        token_file: Some(secret(secrets, "token", TOKEN_OF_BOB)),
        store: StoreConfig { dram_bytes: 8 << 20, huge_pages: false, ..StoreConfig::default() },
        encryption_key_file: None,
    };
    let served = Served::start_node(
        SecurityConfig::default(),
        |_| {},
        |config| {
            config.socket_mode = 0o666;
            config.tenants = vec![bob];
            let directory = config.socket.parent().unwrap();
            fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
        },
    );
    for (tenant, tag) in served.node.tenants().all().iter().zip([0xd1, 0xb0]) {
        let keys: Vec<BlockKey> = (0..8).map(|number| key(tag, number)).collect();
        let bytes = [tag; 4096];
        let puts: Vec<Put<'_>> = keys.iter().map(|key| Put::new(*key, &bytes)).collect();
        tenant.store().put(&puts, CallOptions::default());
        for _ in 0..20 {
            tenant.store().lookup_prefix(&Request::new(&keys));
        }
    }
    served
}

/// A request of another user: made in a thread with that user id.
fn get_as(user: u32, served: &Served, path: &str) -> Answer {
    let socket = served.socket();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let user = Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            get_as_user(&socket, path, &[])
        });
        thread.join().unwrap()
    })
}

fn status(answer: &Answer) -> Status {
    assert_eq!(answer.code, 200, "{}", answer.body);
    serde_json::from_str(&answer.body).unwrap()
}

fn names(status: &Status) -> Vec<&str> {
    status.tenants.iter().map(|tenant| tenant.name.as_str()).collect()
}

/// The loopback port showed every user of the host the names, clients and hot prefixes of all
/// tenants.
#[test]
fn the_port_shows_only_totals_without_a_token() {
    let secrets = tempfile::tempdir().unwrap();
    let served = start(secrets.path());
    for path in PATHS {
        let all = served.get(path);
        let over_tcp = served.get_over_tcp(path);
        assert_eq!((all.code, over_tcp.code), (200, 200), "{path}");
        let mut own = vec!["bobs-lab".to_owned(), "tenant=".to_owned()];
        own.extend([digits(0xd1), digits(0xb0)]);
        for part in own {
            assert!(!over_tcp.body.contains(&part), "{path} shows {part}: {}", over_tcp.body);
        }
        assert!(all.body.contains("bobs-lab"), "{path}: the node's own user sees all tenants");
    }
    let totals = status(&served.get_over_tcp("/status.json"));
    assert_eq!((totals.view.clone(), names(&totals)), (StatusView::Totals, vec![ALL_TENANTS]));
    let all = status(&served.get("/status.json"));
    assert_eq!((all.view.clone(), names(&all)), (StatusView::All, vec!["default", "bobs-lab"]));
    assert!(all.tenants.iter().all(|tenant| tenant.hot_prefixes.len() == 1), "{all:?}");
    let sum: u64 = all.tenants.iter().map(|tenant| tenant.hit_rate.matched_blocks).sum();
    assert_eq!(sum, 2 * 20 * 8);
    assert_eq!(totals.tenants[0].hit_rate.matched_blocks, sum);
    assert_eq!(totals.tenants[0].puts.stored, 16);
    let scrape = served.get_over_tcp("/metrics");
    assert_eq!(scrape.metric("cascade_matched_blocks_total", "") as u64, sum);
}

#[test]
fn over_the_unix_socket_a_user_sees_its_own_tenant() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can change its user id");
        return;
    }
    let secrets = tempfile::tempdir().unwrap();
    let served = start(secrets.path());
    let of_bob = status(&get_as(BOB, &served, "/status.json"));
    assert_eq!(of_bob.view, StatusView::Tenant("bobs-lab".to_owned()));
    assert_eq!(names(&of_bob), ["bobs-lab"]);
    assert_eq!(of_bob.tenants[0].hot_prefixes.len(), 1);
    for path in PATHS {
        let of_bob = get_as(BOB, &served, path).body;
        assert!(of_bob.contains("bobs-lab"), "{path}: {of_bob}");
        assert!(!of_bob.contains(&digits(0xd1)), "{path} shows the default tenant's keys");
        assert!(!of_bob.contains("\"default\""), "{path} shows the default tenant: {of_bob}");
        let of_foreign_user = get_as(FOREIGN_USER, &served, path).body;
        let shows = |part: &str| of_foreign_user.contains(part);
        assert!(!shows("bobs-lab") && !shows(&digits(0xb0)), "{path}: {of_foreign_user}");
    }
    assert_eq!(status(&get_as(FOREIGN_USER, &served, "/status.json")).view, StatusView::Totals);
    assert_eq!(status(&get_as(0, &served, "/status.json")).view, StatusView::All);
    assert_eq!(get_as(FOREIGN_USER, &served, "/healthz").code, 200);
}

#[test]
fn a_tenants_token_shows_that_tenant_on_the_port() {
    let secrets = tempfile::tempdir().unwrap();
    let served = start(secrets.path());
    let right = format!("Authorization: Bearer {TOKEN_OF_BOB}");
    let scrape = get(served.address(), "/metrics", &[&right]);
    let matched = scrape.metric("cascade_matched_blocks_total", "tenant=\"bobs-lab\"");
    assert_eq!(matched as u64, 160, "{}", scrape.body);
    assert!(!scrape.body.contains("\"default\""), "{}", scrape.body);
    let wrong = get(served.address(), "/metrics", &["Authorization: Bearer the-token-of-nobody"]);
    assert_eq!(wrong.code, 401, "a wrong token is never ignored");
}

#[test]
fn a_foreign_user_gets_only_a_share_of_the_connections() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can change its user id");
        return;
    }
    let secrets = tempfile::tempdir().unwrap();
    let served = start(secrets.path());
    let socket = served.socket();
    let idle: Vec<_> = std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            let user = Uid::from_raw(FOREIGN_USER);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            (0..900).map(|_| std::os::unix::net::UnixStream::connect(&socket).unwrap()).collect()
        });
        flood.join().unwrap()
    });
    assert_eq!(served.get("/healthz").code, 200);
    assert_eq!(served.get("/metrics").code, 200);
    assert_eq!(get_as(BOB, &served, "/metrics").code, 200);
    let connections = served.node.traffic().status().http.connections;
    assert!(connections < 400, "{connections} of {} are open", idle.len());
}
