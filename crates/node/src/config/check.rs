//! What makes no sense together, or is not safe, is refused by name before anything starts.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use cascade_store::stage::Registry;
use cascade_store::{Pipeline, Readers, StoreConfig, StoreError, read_secret};

use super::error::ConfigError;
use super::settings::Source;
use super::{NodeConfig, SecurityConfig, TenantConfig};

/// The longest path that a Unix socket can have (`sun_path` without its end).
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// A tenant's longest name: it is a directory's name and a label of metrics.
const TENANT_NAME_BYTES_MAX: usize = 64;

/// No token, key or certificate is longer.
const SECRET_BYTES_MAX: u64 = 1 << 20;

impl NodeConfig {
    /// Refuses what contradicts itself or is not safe, by the names of its keys.
    ///
    /// # Errors
    /// The first [`ConfigError`] that is found.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_socket()?;
        self.security.check(self.listen)?;
        self.check_store(&self.store)?;
        self.check_files()?;
        self.check_tenants()?;
        self.check_secrets()
    }

    /// Keys, each with where it was given.
    fn named(&self, paths: &[&str]) -> String {
        let named = paths.iter().map(|path| match self.settings.node.source(path) {
            Source::Default | Source::Derived(_) => (*path).to_owned(),
            source => format!("{path} ({source})"),
        });
        named.collect::<Vec<_>>().join(", ")
    }

    fn refuse(
        &self,
        paths: &[&str],
        reason: impl Into<String>,
        advice: impl Into<String>,
    ) -> Result<(), ConfigError> {
        Err(ConfigError::contradiction(self.named(paths), reason, advice))
    }

    fn check_socket(&self) -> Result<(), ConfigError> {
        let bytes = self.socket.as_os_str().len();
        if bytes > SOCKET_PATH_BYTES_MAX {
            return self.refuse(
                &["socket"],
                format!("a path of {bytes} bytes; a Unix socket's has at most 107"),
                "give a shorter path",
            );
        }
        if self.socket.file_name().is_none() {
            let reason = format!("{} is no file", self.socket.display());
            return self.refuse(&["socket"], reason, "give the path of a file");
        }
        Ok(())
    }

    fn check_store(&self, store: &StoreConfig) -> Result<(), ConfigError> {
        let pipeline = Pipeline::parse(&store.pipeline, &Registry::default());
        let pipeline = pipeline.map_err(|error| {
            let known = "join stages with |, such as Dram|Files";
            ConfigError::contradiction(self.named(&["pipeline"]), error.to_string(), known)
        })?;
        let stage = pipeline.lower.iter().find(|stage| ["files", "posix"].contains(&&***stage));
        match (stage, &store.files) {
            (Some(stage), None) => self.refuse(
                &["pipeline", "files"],
                format!("{:?} has the stage {stage:?}, which has no directory", store.pipeline),
                "set files (--files DIR), a directory of its own",
            )?,
            (None, Some(files)) => self.refuse(
                &["pipeline", "files"],
                format!("{} is given, but {:?} has no stage Files", files.directory.display(), {
                    &store.pipeline
                }),
                "leave one of them out, or write pipeline = \"Dram|Files\"",
            )?,
            _ => {}
        }
        if store.dirty_bytes_max.is_some_and(|dirty| dirty > store.dram_bytes) {
            self.refuse(
                &["dirty_max", "dram"],
                "more would wait to be written than DRAM holds",
                "lower dirty_max, or leave it out",
            )?;
        }
        store.check().map_err(|error| match error {
            StoreError::Config { setting, reason } => {
                ConfigError::contradiction(setting, reason, "see docs/configuration.md")
            }
            other => ConfigError::contradiction("store", other.to_string(), "change the settings"),
        })
    }

    fn check_files(&self) -> Result<(), ConfigError> {
        let Some(files) = &self.store.files else { return Ok(()) };
        if files.segment_bytes > files.capacity_bytes / 2 && self.settings.node.is_given(SEGMENT) {
            return self.refuse(
                &[SEGMENT, "files_capacity"],
                "a tier has at least two segments",
                "raise files_capacity, or leave segment_size out",
            );
        }
        Ok(())
    }

    fn check_tenants(&self) -> Result<(), ConfigError> {
        let mut users = BTreeMap::new();
        let mut directories: BTreeMap<PathBuf, &str> = BTreeMap::new();
        let own = self.store.files.as_ref().map(|files| (files.directory.clone(), "default"));
        directories.extend(own);
        let mut names = vec!["default"];
        for tenant in &self.tenants {
            check_tenant(tenant, &names)?;
            names.push(&tenant.name);
            self.check_store(&tenant.store)?;
            for user in &tenant.users {
                if let Some(other) = users.insert(*user, &tenant.name) {
                    return Err(ConfigError::contradiction(
                        "tenant.users",
                        format!("user {user} is of both {other:?} and {:?}", tenant.name),
                        "a user of this host is one tenant; tell others by tenant.token_file",
                    ));
                }
            }
            let directory = tenant.store.files.as_ref().map(|files| files.directory.clone());
            let taken = directory.and_then(|path| {
                let path_name = path.display().to_string();
                directories.insert(path, &tenant.name).map(|other| (path_name, other))
            });
            if let Some((path, other)) = taken {
                return Err(ConfigError::contradiction(
                    "tenant.files",
                    format!("{path} is the directory of both {other:?} and {:?}", tenant.name),
                    "give each tenant a directory of its own",
                ));
            }
        }
        Ok(())
    }

    fn check_secrets(&self) -> Result<(), ConfigError> {
        let own = [
            ("token_file", &self.security.token_file, Readers::Group),
            ("tls_private_key", &self.security.private_key, Readers::Owner),
            ("encryption_key_file", &self.encryption_key_file, Readers::Owner),
        ];
        for (key, path, readers) in own {
            if let Some(path) = path {
                check_secret(&self.named(&[key]), path, readers)?;
            }
        }
        for tenant in &self.tenants {
            let files = [
                ("tenant.token_file", &tenant.token_file, Readers::Group),
                ("tenant.encryption_key_file", &tenant.encryption_key_file, Readers::Owner),
            ];
            for (key, path, readers) in files {
                if let Some(path) = path {
                    check_secret(&format!("{key} of {:?}", tenant.name), path, readers)?;
                }
            }
        }
        let stores = self.tenants.iter().map(|tenant| (&tenant.store, &tenant.encryption_key_file));
        for (store, key) in stores.chain([(&self.store, &self.encryption_key_file)]) {
            check_key_is_apart(store, key.as_deref())?;
        }
        Ok(())
    }
}

const SEGMENT: &str = "segment_size";

impl SecurityConfig {
    /// Refuses half of a pair, and a port that strangers reach without proof of who they are.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`] with the keys.
    pub fn check(&self, listen: Option<SocketAddr>) -> Result<(), ConfigError> {
        let refuse = |keys: &str, reason: &str, advice: &str| {
            Err(ConfigError::contradiction(keys, reason, advice))
        };
        if self.certificate.is_some() != self.private_key.is_some() {
            return refuse(
                "tls_certificate, tls_private_key",
                "one is given without the other",
                "TLS needs both; give both or neither",
            );
        }
        if self.client_authority.is_some() && self.certificate.is_none() {
            return refuse(
                "tls_client_ca",
                "callers' certificates can be checked only where the node has its own",
                "set tls_certificate and tls_private_key too",
            );
        }
        let beyond = listen.filter(|address| !address.ip().to_canonical().is_loopback());
        let is_proved = self.token_file.is_some() || self.client_authority.is_some();
        match beyond {
            Some(address) if !is_proved => refuse(
                "listen",
                &format!("{address} is reached from other hosts, and anyone may call"),
                "set token_file, or tls_client_ca with a certificate \
                 (mutual TLS); or listen on 127.0.0.1",
            ),
            _ => Ok(()),
        }
    }
}

fn check_tenant(tenant: &TenantConfig, taken: &[&str]) -> Result<(), ConfigError> {
    let name = &tenant.name;
    let refuse = |key: &str, reason: String, advice: &str| {
        Err(ConfigError::contradiction(key, reason, advice))
    };
    let is_plain = |letter: char| {
        letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-' || letter == '_'
    };
    if name.is_empty() || name.len() > TENANT_NAME_BYTES_MAX || !name.chars().all(is_plain) {
        return refuse(
            "tenant.name",
            format!("{name:?} is no name"),
            "give 1 to 64 lower-case letters, digits, - and _",
        );
    }
    if taken.contains(&&**name) {
        return refuse("tenant.name", format!("there are two tenants {name:?}"), {
            "give each a name of its own; the node's own tenant is \"default\""
        });
    }
    if tenant.users.is_empty() && tenant.token_file.is_none() {
        return refuse(
            "tenant.users, tenant.token_file",
            format!("nobody can be tenant {name:?}"),
            "give users of this host, or a file with a token, or both",
        );
    }
    Ok(())
}

/// Refuses a secret that is missing, is no file, or that others can use.
fn check_secret(key: &str, path: &Path, readers: Readers) -> Result<(), ConfigError> {
    match read_secret(path, SECRET_BYTES_MAX, readers) {
        Ok(_) => Ok(()),
        Err(source) => Err(ConfigError::Secret { key: key.to_owned(), source }),
    }
}

/// A key beside what it protects protects nothing.
fn check_key_is_apart(store: &StoreConfig, key: Option<&Path>) -> Result<(), ConfigError> {
    let files = store.files.as_ref();
    match (files, key) {
        (Some(files), Some(key)) if key.starts_with(&files.directory) => {
            Err(ConfigError::contradiction(
                "encryption_key_file, files",
                format!("{} lies among the files that it encrypts", key.display()),
                "keep the key in another directory, best on another disk",
            ))
        }
        (None, Some(key)) => Err(ConfigError::contradiction(
            "encryption_key_file",
            format!("{} encrypts a file tier, and there is none", key.display()),
            "set files, or leave the key out",
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(names: &[&str]) -> SecurityConfig {
        let file = |name: &str| names.contains(&name).then(|| format!("/{name}").into());
        SecurityConfig {
            token_file: file("token"),
            certificate: file("certificate"),
            private_key: file("key"),
            client_authority: file("authority"),
        }
    }

    #[test]
    fn beyond_loopback_the_port_needs_a_token_or_certificates_on_both_sides() {
        let inside = ["127.0.0.1:0", "127.9.9.9:80", "[::1]:9"];
        let outside = ["0.0.0.0:0", "[::]:0", "192.0.2.1:80"];
        let check = |names: &[&str], at: &str| with(names).check(Some(at.parse().unwrap()));
        for at in inside {
            check(&[], at).unwrap();
        }
        for at in outside {
            let said = check(&[], at).unwrap_err().to_string();
            assert!(said.contains(at) && said.contains("token_file"), "{said}");
            let one_sided = check(&["certificate", "key"], at).unwrap_err().to_string();
            assert!(one_sided.contains("listen"), "encrypted is not guarded: {one_sided}");
            check(&["token"], at).unwrap();
            check(&["certificate", "key", "authority"], at).unwrap();
        }
    }

    #[test]
    fn half_of_a_pair_is_refused_by_name() {
        let at = "127.0.0.1:0".parse().unwrap();
        for (names, missing) in
            [(["certificate"], "private_key"), (["key"], "certificate"), (["authority"], "certif")]
        {
            let said = with(&names).check(Some(at)).unwrap_err().to_string();
            assert!(said.contains(missing), "{said}");
        }
    }
}
