//! `cascade keys` over a real node: filters, pages, tenants.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use crate::admin::ServedNode;

const TOKEN: &str = "0123456789abcdef-alice";

/// A key that begins with this hexadecimal digit.
fn key(n: usize) -> String {
    format!("{n:x}bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a")
}

fn start() -> ServedNode {
    let settings = "files = \"HERE/files\"\nfiles_capacity = \"64MiB\"\n\
                    [[tenant]]\nname = \"alice\"\ntoken_file = \"HERE/alice.token\"\n\
                    dram = \"8MiB\"\n";
    ServedNode::start_as(settings, &mut crate::cascade(), |directory| {
        let token = directory.path().join("alice.token");
        fs::write(&token, TOKEN).unwrap();
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(directory.path().join("block"), [7; 3000]).unwrap();
    })
}

fn put(node: &ServedNode, numbers: std::ops::Range<usize>, flags: &[&str]) {
    let block = node.path("block").display().to_string();
    for n in numbers {
        node.output(&[&["put", &key(n), &block], flags].concat());
    }
}

fn listed(node: &ServedNode, flags: &[&str]) -> (Vec<String>, Option<String>) {
    let listing = node.json(&[&["keys"], flags].concat());
    let keys = listing["keys"].as_array().unwrap().iter();
    let keys = keys.map(|it| it["key"].as_str().unwrap().to_owned()).collect();
    (keys, listing["next"].as_str().map(str::to_owned))
}

fn sorted(node: &ServedNode, flags: &[&str]) -> Vec<String> {
    let (mut keys, next) = listed(node, flags);
    assert_eq!(next, None);
    keys.sort();
    keys
}

#[test]
fn keys_are_listed_with_their_blocks_and_filtered() {
    let node = start();
    let nothing = node.run(&["keys"]);
    assert!(nothing.stdout.is_empty() && nothing.status.success());
    put(&node, 0..4, &[]);
    node.output(&["flush"]);
    node.output(&["get", &key(2)]);
    let text = node.output(&["keys"]);
    assert_eq!(text.lines().count(), 5, "{text}");
    assert!(text.starts_with("key "), "{text}");
    let line = |n: usize| text.lines().find(|line| line.starts_with(&key(n))).unwrap();
    assert!(line(1).contains("dram+files") && line(1).ends_with("never"), "{text}");
    assert!(line(2).contains("2.9 KiB") && line(2).ends_with("seconds ago"), "{text}");
    let all: Vec<_> = (0..4).map(key).collect();
    assert_eq!(sorted(&node, &[]), all);
    assert_eq!(sorted(&node, &["--tier", "files"]), all);
    assert_eq!(sorted(&node, &["--prefix", "3"]), [key(3)]);
    assert_eq!(sorted(&node, &["--prefix", &key(1).to_uppercase()]), [key(1)]);
    assert!(sorted(&node, &["--prefix", "ff"]).is_empty());
    let row = &node.json(&["keys", "--prefix", "2"])["keys"][0];
    assert_eq!((&row["bytes"], &row["uses"]), (&3000.into(), &1.into()));
    assert_eq!(row["tiers"], serde_json::json!(["dram", "files"]));
    assert!(node.refused(1, &["keys", "--tier", "hbm"]).contains("the tiers are dram, files"));
    assert!(node.refused(2, &["keys", "--prefix", "xyz"]).contains("hexadecimal"));
    assert!(node.refused(2, &["keys", "--prefix", &"0".repeat(65)]).contains("hexadecimal"));
    node.refused(2, &["keys", "--limit", "0"]);
}

#[test]
fn the_pages_of_a_list_have_each_key_once_while_others_change() {
    let node = start();
    put(&node, 0..10, &[]);
    let mut seen = Vec::new();
    let (first, mut next) = listed(&node, &["--limit", "3"]);
    assert_eq!(first.len(), 3);
    seen.extend(first);
    // One that was listed goes, another comes.
    node.output(&["delete", &seen[0]]);
    put(&node, 10..11, &[]);
    while let Some(cursor) = next {
        let (page, after) = listed(&node, &["--limit", "3", "--cursor", &cursor]);
        assert!(page.len() <= 3);
        seen.extend(page);
        next = after;
    }
    let distinct: BTreeSet<_> = seen.iter().collect();
    assert_eq!(distinct.len(), seen.len(), "none twice: {seen:?}");
    assert!((0..10).all(|n| distinct.contains(&key(n))), "none missed: {seen:?}");
    let text = node.run(&["keys", "--limit", "3"]);
    assert!(crate::stderr(&text).contains("--cursor "), "{}", crate::stderr(&text));
    for wrong in ["5", "zz-1", "0-0", ""] {
        assert!(node.refused(1, &["keys", "--cursor", wrong]).contains("cursor"), "{wrong}");
    }
}

#[test]
fn a_tenant_sees_its_own_keys_only() {
    let node = start();
    let token = node.path("alice.token").display().to_string();
    let alice = ["--token-file", token.as_str()];
    put(&node, 0..2, &[]);
    put(&node, 2..3, &alice);
    assert_eq!(sorted(&node, &[]), [key(0), key(1)]);
    assert_eq!(sorted(&node, &alice), [key(2)]);
    // The administrator may name each tenant, a tenant itself alone.
    assert_eq!(sorted(&node, &["--tenant", "alice"]), [key(2)]);
    assert_eq!(sorted(&node, &[&alice[..], &["--tenant", "alice"]].concat()), [key(2)]);
    let other = [&["keys", "--tenant", "default"][..], &alice].concat();
    assert!(node.refused(1, &other).contains("has no access to tenant \"default\""));
    let unknown = [&["keys", "--tenant", "bob"][..], &alice].concat();
    assert!(node.refused(1, &unknown).contains("has no access to tenant \"bob\""));
}
