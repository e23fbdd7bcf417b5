//! Checks that crates depend on each other only as the drawing in `ARCHITECTURE.md` has it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Each crate, and the crates of ours that it may depend on. Tests may depend on others.
const LAYERS: &[(&str, &str)] = &[
    ("block", ""),
    ("runtime", ""),
    ("memory", "block runtime"),
    ("device", "memory runtime"),
    // Tests load it at run time.
    ("device-fake", "runtime"),
    ("tier", "block memory runtime"),
    ("transport", "block memory runtime"),
    ("disk", "block memory runtime tier"),
    ("wire", "block runtime tier"),
    ("store", "block disk memory runtime tier"),
    ("cluster", "block memory runtime tier transport"),
    ("client", "block memory runtime tier wire"),
    ("node", "block cluster device disk memory runtime store tier transport wire"),
    ("sim", "block disk memory runtime store tier transport"),
    ("replay", "block runtime store tier"),
    ("bench", "block client device memory replay runtime store tier transport wire"),
    ("kv-bench", "block memory replay runtime store"),
    ("command", "bench block client disk kv-bench memory node replay runtime sim store tier wire"),
    // What a worker loads: no node, no benchmark, no terminal, no HTTP client.
    ("python", "block client device memory runtime store tier transport"),
];

#[test]
fn crates_depend_only_on_crates_below() {
    let allowed: BTreeMap<&str, BTreeSet<&str>> =
        LAYERS.iter().map(|(name, below)| (*name, below.split(' ').collect())).collect();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut violations = Vec::new();
    for entry in fs::read_dir(crates).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let Some(below) = allowed.get(&*name) else {
            violations.push(format!("crates/{name} has no line in LAYERS"));
            continue;
        };
        let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap();
        let others = dependencies(&manifest);
        let above = others.iter().filter(|it| !below.contains(&***it));
        violations.extend(above.map(|it| format!("crates/{name} must not depend on {it}")));
    }
    assert!(violations.is_empty(), "\n{}", violations.join("\n"));
}

/// `make build` compiles the program and the Python module with two commands. If the features of a
/// crate that both link differed, it would be compiled twice, and so would all that depend on it.
#[test]
fn the_program_and_the_module_share_the_builds_of_their_crates() {
    let (program, module) = (features("cascade-command"), features("cascade-python"));
    let differ = program.iter().filter_map(|(name, ours)| {
        let theirs = module.get(name)?;
        (ours != theirs).then(|| format!("{name}: {ours:?}, in the module {theirs:?}"))
    });
    let differ: Vec<_> = differ.collect();
    assert!(differ.is_empty(), "add features in crates/python:\n{}", differ.join("\n"));
    assert!(module.len() > 30 && program.contains_key("cascade-store v0.1.0"), "{module:?}");
}

/// The features of each crate that is linked into the target of `package`, by name and version.
fn features(package: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["tree", "--offline", "--locked", "--prefix=none", "--format={p}\t{f}"]);
    command.args(["--edges=normal,no-proc-macro", "--package", package]);
    let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).expect("cargo prints UTF-8");
    let crates = lines.lines().filter_map(|line| line.split_once('\t'));
    let crates = crates.map(|(name, features)| {
        let name = name.split(' ').take(2).collect::<Vec<_>>().join(" ");
        let features = features.trim_end_matches(" (*)").split(',');
        (name, features.filter(|it| !it.is_empty()).map(str::to_owned).collect())
    });
    crates.collect()
}

/// The crates of ours under `[dependencies]`, without `cascade-`.
fn dependencies(manifest: &str) -> Vec<String> {
    let section = manifest.split("\n[dependencies]\n").nth(1).unwrap_or_default();
    let lines = section.lines().take_while(|line| !line.starts_with('['));
    let ours = lines.filter_map(|line| line.strip_prefix("cascade-"));
    ours.map(|line| line.split(['.', ' ', '=']).next().unwrap_or_default().to_owned()).collect()
}

/// Each line of `LAYERS` names only crates of the lines before it, so that there is no circle.
#[test]
fn layers_are_in_order() {
    let mut before = BTreeSet::new();
    for (name, below) in LAYERS {
        for it in below.split(' ').filter(|it| !it.is_empty()) {
            assert!(before.contains(it), "{name} names {it}, which is not below it");
        }
        before.insert(*name);
    }
}

#[test]
fn dependencies_of_tests_are_not_counted() {
    let manifest = "[package]\n\n[dependencies]\ncascade-block.workspace = true\nclap = \"4\"\n\n\
        [dev-dependencies]\ncascade-node.workspace = true\n";
    assert_eq!(dependencies(manifest), ["block"]);
}
