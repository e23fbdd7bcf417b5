//! `cascade vllm-config` prints what vLLM takes: the node that runs, or a store of its own.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::{cascade, stderr};

/// The printed value, and what was said about it.
fn printed(args: &[&str], socket: &Path) -> (Value, String) {
    let mut command = cascade();
    let output = command.arg("vllm-config").args(args).env("CASCADE_SOCKET", socket).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
    (serde_json::from_slice(&output.stdout).unwrap(), stderr(&output))
}

#[test]
fn without_a_node_an_engine_gets_a_store_of_its_own() {
    let directory = tempfile::TempDir::new().unwrap();
    let socket = directory.path().join("nobody");
    let (value, said) = printed(&[], &socket);
    assert_eq!(value["kv_connector"], "CascadeConnector");
    assert_eq!(value["kv_connector_module_path"], "cascadekv.connectors.vllm");
    assert_eq!(value["kv_load_failure_policy"], "recompute");
    let settings = value["kv_connector_extra_config"].as_object().unwrap();
    let dram: cascade_block::ByteSize = settings["cascade.dram"].as_str().unwrap().parse().unwrap();
    assert!(dram.0 >= 1 << 20, "{dram}");
    assert_eq!(settings.len(), 1);
    assert!(said.contains("a quarter of the ") && said.contains("cascade serve"), "{said}");

    let files = directory.path().join("kv").display().to_string();
    let args = ["--dram", "2GiB", "--files", &files, "--files-capacity", "10GiB"];
    let (value, said) = printed(&args, &socket);
    let settings = json!({
        "cascade.dram": "2GiB", "cascade.files": files, "cascade.files_capacity": "10GiB"
    });
    assert_eq!(value["kv_connector_extra_config"], settings);
    assert!(said.contains("outlive it"), "{said}");
}

#[test]
fn a_node_that_runs_is_used_unless_a_size_is_given() {
    let directory = tempfile::TempDir::new().unwrap();
    let socket = directory.path().join("socket");
    let mut command = cascade();
    command.args(["serve", "--dram", "4MiB", "--keep-pool", "never", "--socket"]).arg(&socket);
    let mut node = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(node.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let address = json!({ "cascade.node": format!("unix:{}", socket.display()) });
    let used = printed(&[], &socket);
    let given = printed(&["--dram", "64MiB"], &socket);
    node.kill().unwrap();
    node.wait().unwrap();
    assert_eq!(used.0["kv_connector_extra_config"], address, "{}", used.1);
    assert_eq!(given.0["kv_connector_extra_config"], json!({ "cascade.dram": "64MiB" }));
    let named = printed(&["--socket", socket.to_str().unwrap()], Path::new("/no/socket"));
    assert_eq!(named.0["kv_connector_extra_config"], address, "though it does not run");
}
