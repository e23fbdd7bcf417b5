//! Old names of settings, so that the error for an old name can say the new one.

use super::keys::KEYS;

/// Old name, new name. An old name with a dot was a key in a table.
const RENAMED: &[(&str, &str)] = &[
    ("node.socket", "socket"),
    ("node.socket_mode", "socket_mode"),
    ("node.listen", "listen"),
    ("node.shutdown_timeout", "shutdown_timeout"),
    ("security.token_file", "token_file"),
    ("security.certificate", "tls_certificate"),
    ("security.private_key", "tls_private_key"),
    ("security.client_authority", "tls_client_ca"),
    ("security.encryption_key_file", "encryption_key_file"),
    ("dram.capacity", "dram"),
    ("dram.huge_pages", "huge_pages"),
    ("dram.policy", "policy"),
    ("dram.protected", "protected_share"),
    ("dram.pool_directory", "pool_directory"),
    ("dram.keep_pool", "keep_pool"),
    ("files.directory", "files"),
    ("files.capacity", "files_capacity"),
    ("files.layout", "files_layout"),
    ("files.segment", "segment_size"),
    ("files.engine", "io_engine"),
    ("files.direct", "direct_io"),
    ("files.durable", "durable"),
    ("store.pipeline", "pipeline"),
    ("store.write", "write"),
    ("store.digest", "digest"),
    ("store.admit_partial", "admit_partial"),
    ("store.timeout", "timeout"),
    ("store.dirty_max", "dirty_max"),
    ("store.mover_rate", "mover_rate"),
    ("store.changes_max", "changes_max"),
    ("health.probe_interval", "probe_interval"),
    ("health.probe_timeout", "probe_timeout"),
    ("health.window", "failure_window"),
    ("health.threshold", "failure_threshold"),
    ("limits.connections", "connections_max"),
    ("limits.client_share", "client_share"),
    ("limits.threads", "threads_max"),
    ("log.format", "log_format"),
    ("log.filter", "log_filter"),
    ("traces.endpoint", "traces_endpoint"),
    ("tenant.files_directory", "tenant.files"),
    ("dirty_bytes_max", "dirty_max"),
    ("mover_bytes_per_second", "mover_rate"),
    ("protected_percent", "protected_share"),
    ("direct", "direct_io"),
    ("engine", "io_engine"),
];

/// The new name of a setting, by its old one.
pub(super) fn new_name_of(old: &str) -> Option<&'static str> {
    RENAMED.iter().find(|(known, _)| *known == old).map(|(_, new)| *new)
}

/// The new name of a setting, by the end of its old variable, such as `DRAM_CAPACITY` of
/// `CASCADE_DRAM_CAPACITY`.
pub(super) fn new_name_of_variable(tail: &str) -> Option<&'static str> {
    let is_match = |old: &str| old.replace('.', "_").eq_ignore_ascii_case(tail);
    let found = RENAMED.iter().find(|(old, _)| is_match(old)).map(|(_, new)| *new);
    found.filter(|new| KEYS.iter().any(|key| key.path == *new))
}

/// Whether a table of this name held settings in earlier versions.
pub(super) fn is_old_section(name: &str) -> bool {
    RENAMED.iter().any(|(old, _)| old.split_once('.').is_some_and(|(section, _)| section == name))
        && name != "tenant"
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::super::keys::TENANT_KEYS;
    use super::*;

    #[test]
    fn every_new_name_is_a_key_and_no_old_one_is() {
        let is_key = |name: &str| KEYS.iter().chain(TENANT_KEYS).any(|key| key.path == name);
        for (old, new) in RENAMED {
            assert!(is_key(new), "{new}");
            assert!(!is_key(old), "{old}");
        }
    }

    /// The text that users may read: string literals of Rust sources, and other files whole.
    fn user_visible_text(path: &Path) -> String {
        let all = fs::read_to_string(path).unwrap();
        if path.extension().is_none_or(|kind| kind != "rs") {
            return all;
        }
        let plain = all.replace("'\"'", "' '").replace("\\\"", "  ");
        plain.split('"').skip(1).step_by(2).collect::<Vec<_>>().join("\n")
    }

    fn files_below(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let kind = path.extension().and_then(|kind| kind.to_str()).unwrap_or_default();
            if path.is_dir() {
                files_below(&path, found);
            } else if ["rs", "md", "py", "service", "toml", "yml"].contains(&kind)
                || path.ends_with("Containerfile")
            {
                found.push(path);
            }
        }
    }

    /// An error said "give this one a writer name of its own", and there was no such setting. A
    /// text with the old name of a setting is the same mistake.
    #[test]
    fn no_text_uses_the_old_name_of_a_setting() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut paths = Vec::new();
        for below in ["docs", "packaging", "python/cascadekv", "examples"] {
            files_below(&root.join(below), &mut paths);
        }
        for member in ["bench", "block", "client", "disk", "memory", "node", "python", "store"] {
            files_below(&root.join("crates").join(member).join("src"), &mut paths);
        }
        // The first is this table, and the second tests it. The others contain names of fields of
        // the status, which are not settings.
        let exceptions =
            ["config/renamed.rs", "config/environment.rs", "config/file.rs", "http/page.rs"];
        paths.retain(|path| !exceptions.iter().any(|exception| path.ends_with(exception)));
        let is_boundary = |letter: Option<char>| {
            letter.is_none_or(|letter| !letter.is_alphanumeric() && !"_./{(".contains(letter))
        };
        let mut stale = Vec::new();
        for path in paths {
            let text = user_visible_text(&path);
            for (old, new) in RENAMED.iter().filter(|(old, _)| old.contains('.')) {
                let is_named = text.match_indices(old).any(|(at, _)| {
                    let (before, after) = (&text[..at], &text[at + old.len()..]);
                    let begins = before
                        .chars()
                        .next_back()
                        .is_none_or(|letter| letter == '(' || is_boundary(Some(letter)));
                    begins && (is_boundary(after.chars().next()) || after.starts_with(". "))
                });
                let variable = format!("CASCADE_{}", old.replace('.', "_").to_uppercase());
                // `files.capacity` and `files_capacity` have one variable.
                let is_variable = variable != format!("CASCADE_{}", new.to_uppercase())
                    && text
                        .match_indices(&variable)
                        .any(|(at, _)| is_boundary(text[at + variable.len()..].chars().next()));
                if is_named || is_variable {
                    stale.push(format!("{}: {old} is now {new}", path.display()));
                }
            }
        }
        assert!(stale.is_empty(), "{}", stale.join("\n"));
    }
}
