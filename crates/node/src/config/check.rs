//! Checks a configuration for contradictions and unsafe settings before the node starts.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use cascade_store::stages::StageRegistry;
use cascade_store::{Pipeline, SecretReaders, StoreConfig, StoreError, read_secret};
use cascade_wire::SOCKET_PATH_BYTES_MAX;

use super::error::ConfigError;
use super::settings::{SettingSource, Values};
use super::{ClusterSettings, NodeConfig, SecurityConfig, TenantConfig};

/// The longest tenant name. It is used as a directory name and as a metric label.
const TENANT_NAME_BYTES_MAX: usize = 64;

/// Size limit of a file with a token, key or certificate.
const SECRET_BYTES_MAX: u64 = 1 << 20;

impl NodeConfig {
    /// The size of all tenants' pools.
    pub(crate) fn dram_bytes(&self) -> u64 {
        let tenants = self.tenants.iter().map(|tenant| tenant.store.dram_bytes);
        tenants.fold(self.store.dram_bytes, u64::saturating_add)
    }

    /// Whether a tenant has a quota of its own, so that it does not follow the node's setting.
    pub(crate) fn has_quota(&self, tenant: &str, key: &str) -> bool {
        let named = |its: &&Values| its.text("tenant.name").as_deref() == Some(tenant);
        self.settings.tenants.iter().find(named).is_some_and(|its| its.is_given(key))
    }

    /// Refuses contradictory or unsafe settings.
    ///
    /// # Errors
    /// The first problem, with the names of the keys.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_socket()?;
        self.security.check(self.listen)?;
        self.check_gpu()?;
        ClusterSettings::check(self)?;
        self.check_store(&self.store)?;
        self.check_files()?;
        self.check_tenants()?;
        self.check_secrets()
    }

    /// The keys, separated by commas, each with its source if it was set.
    pub(super) fn with_sources(&self, paths: &[&str]) -> String {
        let keys = paths.iter().map(|path| match self.settings.node.source(path) {
            SettingSource::Default | SettingSource::Derived(_) => (*path).to_owned(),
            source => format!("{path} ({source})"),
        });
        keys.collect::<Vec<_>>().join(", ")
    }

    fn refuse(
        &self,
        paths: &[&str],
        reason: impl Into<String>,
        advice: impl Into<String>,
    ) -> Result<(), ConfigError> {
        Err(ConfigError::contradiction(self.with_sources(paths), reason, advice))
    }

    fn check_socket(&self) -> Result<(), ConfigError> {
        let bytes = self.socket.as_os_str().len();
        if bytes > SOCKET_PATH_BYTES_MAX {
            return self.refuse(
                &["socket"],
                format!("the path has {bytes} bytes; a Unix socket allows {SOCKET_PATH_BYTES_MAX}"),
                "use a shorter path",
            );
        }
        if self.socket.file_name().is_none() {
            let reason = format!("{} is a directory, not a file", self.socket.display());
            return self.refuse(&["socket"], reason, "use the path of a file");
        }
        Ok(())
    }

    fn check_gpu(&self) -> Result<(), ConfigError> {
        let hbm_is_given = self.settings.node.is_given("hbm");
        let uuid = self.gpu.as_ref().or(self.gpu_node.as_ref().map(|node| &node.uuid));
        match uuid {
            None if hbm_is_given => self.refuse(
                &["hbm"],
                "the HBM tier has a size, but no GPU is named for it",
                "set gpu to the UUID of a GPU (`cascade doctor` lists them), or remove hbm",
            ),
            Some(_) if !hbm_is_given => self.refuse(
                &["gpu"],
                "a GPU is named, but not how much of its memory to take",
                "set hbm, such as hbm = \"8GiB\"",
            ),
            Some(_) if !self.tenants.is_empty() => self.refuse(
                &["gpu"],
                "a node in the memory of a GPU has one tenant",
                "start a node for each tenant, or remove the [[tenant]] tables",
            ),
            Some(_) if self.gpu.is_some() && self.settings.node.is_given("dram") => self.refuse(
                &["pipeline", "dram"],
                "DRAM has a size, but the pipeline has no stage Dram behind Hbm",
                "remove one of them, or set pipeline = \"Hbm|Dram\"",
            ),
            _ => self.check_socket_of_gpu_node(),
        }
    }

    fn check_socket_of_gpu_node(&self) -> Result<(), ConfigError> {
        let Some(node) = &self.gpu_node else { return Ok(()) };
        let bytes = node.socket.as_os_str().len();
        if bytes <= SOCKET_PATH_BYTES_MAX {
            return Ok(());
        }
        self.refuse(
            &["socket", "gpu"],
            format!(
                "{}, the socket of the node of the GPU, has {bytes} bytes; a Unix socket allows \
                 {SOCKET_PATH_BYTES_MAX}",
                node.socket.display()
            ),
            "use a shorter path for socket",
        )
    }

    fn check_store(&self, store: &StoreConfig) -> Result<(), ConfigError> {
        let registry = StageRegistry::default();
        let pipeline = if self.gpu.is_some() {
            Pipeline::parse_on_device(&store.pipeline, &registry)
        } else {
            Pipeline::parse(&store.pipeline, &registry)
        };
        let pipeline = pipeline.map_err(|error| {
            let advice = "join stages with |, such as Dram|Files";
            ConfigError::contradiction(self.with_sources(&["pipeline"]), error.to_string(), advice)
        })?;
        let stage = pipeline.lower.iter().find(|stage| *stage == "files");
        match (stage, &store.files) {
            (Some(stage), None) => self.refuse(
                &["pipeline", "files"],
                format!("{:?} has the stage {stage:?}, but no directory is set", store.pipeline),
                "set files (--files DIR) to a directory that nothing else uses",
            )?,
            (None, Some(files)) => self.refuse(
                &["pipeline", "files"],
                format!("files is {}, but {:?} has no stage Files", files.directory.display(), {
                    &store.pipeline
                }),
                "remove one of them, or set pipeline = \"Dram|Files\"",
            )?,
            _ => {}
        }
        if store.dirty_bytes_max.is_some_and(|dirty| dirty > store.dram_bytes) {
            self.refuse(
                &["dirty_max", "dram"],
                "the limit on pending writes is larger than DRAM",
                "lower dirty_max, or remove it",
            )?;
        }
        store.check().map_err(|error| match error {
            StoreError::Config { setting, reason } => {
                ConfigError::contradiction(setting, reason, "see docs/configuration.md")
            }
            other => {
                ConfigError::contradiction("store", other.to_string(), "see docs/configuration.md")
            }
        })
    }

    fn check_files(&self) -> Result<(), ConfigError> {
        let Some(files) = &self.store.files else { return Ok(()) };
        if files.segment_bytes > files.capacity_bytes / 2 && self.settings.node.is_given(SEGMENT) {
            return self.refuse(
                &[SEGMENT, "files_capacity"],
                "the tier has room for fewer than two segments",
                "raise files_capacity, or remove segment_size",
            );
        }
        Ok(())
    }

    fn check_tenants(&self) -> Result<(), ConfigError> {
        let mut users = BTreeMap::new();
        let mut directories: BTreeMap<PathBuf, &str> = BTreeMap::new();
        let default = self.store.files.as_ref().map(|files| (files.directory.clone(), "default"));
        directories.extend(default);
        let mut names = vec!["default"];
        for tenant in &self.tenants {
            check_tenant(tenant, &names)?;
            names.push(&tenant.name);
            self.check_store(&tenant.store)?;
            for user in &tenant.users {
                if let Some(other) = users.insert(*user, &tenant.name) {
                    return Err(ConfigError::contradiction(
                        "tenant.users",
                        format!("user {user} belongs to both {other:?} and {:?}", tenant.name),
                        "list each user in one tenant; use tenant.token_file for the other",
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
                    "set a different directory for each tenant",
                ));
            }
        }
        Ok(())
    }

    fn check_secrets(&self) -> Result<(), ConfigError> {
        let own = [
            ("token_file", &self.security.token_file, SecretReaders::Group),
            ("tls_private_key", &self.security.private_key, SecretReaders::Owner),
            ("encryption_key_file", &self.encryption_key_file, SecretReaders::Owner),
        ];
        let peers = self.cluster.iter().flat_map(|cluster| {
            [
                ("peer_token_file", &cluster.token_file, SecretReaders::Group),
                ("peer_tls_private_key", &cluster.private_key, SecretReaders::Owner),
            ]
        });
        for (key, path, readers) in own.into_iter().chain(peers) {
            if let Some(path) = path {
                check_secret(&self.with_sources(&[key]), path, readers)?;
            }
        }
        for tenant in &self.tenants {
            let files = [
                ("tenant.token_file", &tenant.token_file, SecretReaders::Group),
                ("tenant.encryption_key_file", &tenant.encryption_key_file, SecretReaders::Owner),
            ];
            for (key, path, readers) in files {
                if let Some(path) = path {
                    check_secret(&format!("{key} of {:?}", tenant.name), path, readers)?;
                }
            }
        }
        let stores = self.tenants.iter().map(|tenant| (&tenant.store, &tenant.encryption_key_file));
        for (store, key) in stores.chain([(&self.store, &self.encryption_key_file)]) {
            check_encryption_key(store, key.as_deref())?;
        }
        Ok(())
    }
}

const SEGMENT: &str = "segment_size";

impl SecurityConfig {
    /// Refuses an incomplete pair of keys, and a port that other hosts reach without
    /// authentication.
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
                "one is set without the other",
                "TLS needs both: set both or neither",
            );
        }
        if self.client_authority.is_some() && self.certificate.is_none() {
            return refuse(
                "tls_client_ca",
                "client certificates need TLS, and the node has no certificate",
                "set tls_certificate and tls_private_key too",
            );
        }
        let exposed = listen.filter(|address| !address.ip().to_canonical().is_loopback());
        let is_authenticated = self.token_file.is_some() || self.client_authority.is_some();
        match exposed {
            Some(address) if !is_authenticated => refuse(
                "listen",
                &format!("{address} accepts connections from other hosts without authentication"),
                "set token_file, or set tls_client_ca with a certificate (mutual TLS), or listen \
                 on 127.0.0.1",
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
            format!("{name:?} is not a valid name"),
            "use 1 to 64 lower-case letters, digits, - and _",
        );
    }
    if taken.contains(&&**name) {
        return refuse("tenant.name", format!("there are two tenants {name:?}"), {
            "use a different name for each; \"default\" is the node's own tenant"
        });
    }
    if tenant.users.is_empty() && tenant.token_file.is_none() {
        return refuse(
            "tenant.users, tenant.token_file",
            format!("no client can authenticate as tenant {name:?}"),
            "set users of this host, or a file with a token, or both",
        );
    }
    Ok(())
}

/// Refuses a file with a secret that is missing, is not a regular file, or is open to others.
fn check_secret(key: &str, path: &Path, readers: SecretReaders) -> Result<(), ConfigError> {
    match read_secret(path, SECRET_BYTES_MAX, readers) {
        Ok(_) => Ok(()),
        Err(source) => Err(ConfigError::Secret { key: key.to_owned(), source }),
    }
}

/// Refuses a key inside the directory that it encrypts, because a copy of the directory would
/// contain the key. Refuses a key without a file tier.
fn check_encryption_key(store: &StoreConfig, key: Option<&Path>) -> Result<(), ConfigError> {
    let files = store.files.as_ref();
    match (files, key) {
        (Some(files), Some(key)) if key.starts_with(&files.directory) => {
            Err(ConfigError::contradiction(
                "encryption_key_file, files",
                format!("{} is inside the directory that it encrypts", key.display()),
                "move the key to another directory, best on another disk",
            ))
        }
        (None, Some(key)) => Err(ConfigError::contradiction(
            "encryption_key_file",
            format!("{} is set, but there is no file tier to encrypt", key.display()),
            "set files, or remove encryption_key_file",
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn security_with(names: &[&str]) -> SecurityConfig {
        let file = |name: &str| names.contains(&name).then(|| format!("/{name}").into());
        SecurityConfig {
            token_file: file("token"),
            certificate: file("certificate"),
            private_key: file("key"),
            client_authority: file("authority"),
        }
    }

    #[test]
    fn an_address_that_is_not_loopback_needs_a_token_or_mutual_tls() {
        let loopback = ["127.0.0.1:0", "127.9.9.9:80", "[::1]:9"];
        let exposed = ["0.0.0.0:0", "[::]:0", "192.0.2.1:80"];
        let check =
            |names: &[&str], at: &str| security_with(names).check(Some(at.parse().unwrap()));
        for at in loopback {
            check(&[], at).unwrap();
        }
        for at in exposed {
            let message = check(&[], at).unwrap_err().to_string();
            assert!(message.contains(at) && message.contains("token_file"), "{message}");
            let one_sided = check(&["certificate", "key"], at).unwrap_err().to_string();
            assert!(one_sided.contains("listen"), "TLS alone authenticates no client: {one_sided}");
            check(&["token"], at).unwrap();
            check(&["certificate", "key", "authority"], at).unwrap();
        }
    }

    #[test]
    fn an_incomplete_pair_of_keys_is_refused_by_name() {
        let at = "127.0.0.1:0".parse().unwrap();
        for (names, missing) in
            [(["certificate"], "private_key"), (["key"], "certificate"), (["authority"], "certif")]
        {
            let message = security_with(&names).check(Some(at)).unwrap_err().to_string();
            assert!(message.contains(missing), "{message}");
        }
    }
}
