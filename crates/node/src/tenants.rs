//! Tenants: identities with a store each. A client belongs to exactly one tenant.
//!
//! A client is identified by the user id that the kernel reports for its socket, or by a token. It
//! receives the descriptor of its tenant's pool only. So one tenant cannot probe, read or evict the
//! blocks of another, whatever keys and namespaces it sends.

mod identity;
mod receipt;

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cascade_memory::MemoryError;
use cascade_runtime::{Clock as _, SystemClock};
use cascade_store::stages::StageRegistry;
use cascade_store::{CallOptions, EncryptionConfig, SecretError, Store, StoreConfig, StoreError};
use ring::digest::{SHA256, digest};
use thiserror::Error;

use self::identity::{Token, Tokens};
pub use self::receipt::{Leftover, MemoryReceipt, Receipt, TierReceipt};
use crate::NodeConfig;
use crate::config::AdminGroup;
use crate::gpu::{GpuError, NodeGpu};

/// The user id of root, who may always administer the node.
const ROOT_USER: u32 = 0;

/// The tenant of the node's own user.
pub const DEFAULT_TENANT: &str = "default";

/// Why the tenants of a configuration cannot be served.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TenantError {
    /// A store could not be opened.
    #[error("cannot open the store of tenant {tenant:?}")]
    Store {
        /// The tenant.
        tenant: String,
        /// The cause.
        #[source]
        source: StoreError,
    },
    /// The GPU cannot be used.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A token file cannot be used.
    #[error("cannot use the token_file of tenant {tenant:?}")]
    Token {
        /// The tenant.
        tenant: String,
        /// The cause.
        #[source]
        source: SecretError,
    },
    /// Two tenants share what has to be unique: a name, user, token or directory.
    #[error("tenants {one:?} and {other:?}: {reason}")]
    Ambiguous {
        /// One of them.
        one: String,
        /// The other.
        other: String,
        /// What they share.
        reason: String,
    },
    /// The tenant has neither users nor a token.
    #[error("no client can belong to tenant {tenant:?}; give it users or a token_file")]
    NoIdentity {
        /// The tenant.
        tenant: String,
    },
}

/// Why a client belongs to no tenant. Every wrong token gives the same error.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No tenant has this token.
    #[error("the token belongs to no tenant; compare the client's token_file with the node's")]
    Token,
    /// The user may not administer the node and belongs to no tenant.
    #[error(
        "user {user} may not administer this node; run the command as the node's own user or as \
         root, or add the user to the group that admin_group names"
    )]
    Administrator {
        /// The user id.
        user: u32,
    },
    /// The user belongs to no tenant, and the client sent no token.
    #[error(
        "user {user} belongs to no tenant of this node; use a tenant's token, or add \
         `users = [{user}]` to a [[tenant]] of the node's configuration and restart it; to \
         administer the node, add the user to the group that admin_group names"
    )]
    User {
        /// The user id.
        user: u32,
    },
}

/// One tenant.
#[derive(Debug)]
pub struct Tenant {
    name: String,
    store: Store,
}

impl Tenant {
    fn open(
        name: &str,
        mut store: StoreConfig,
        key: Option<&PathBuf>,
        node: &NodeConfig,
        gpu: Option<&NodeGpu>,
    ) -> Result<Self, TenantError> {
        store.keep_pool = node.keep_pool;
        store.pool_file = pool_file(node, name);
        if let Some(key_file) = key {
            let key_file = key_file.clone();
            store.encryption = Some(EncryptionConfig { key_file, scope: name.to_owned() });
        }
        if let Some(gpu) = gpu {
            let device = Arc::clone(&gpu.memory);
            let (registry, clock) = (StageRegistry::default(), Arc::new(SystemClock));
            let opened = Store::open_on_device(store, device, &registry, clock);
            let store =
                opened.map_err(|source| TenantError::Store { tenant: name.to_owned(), source })?;
            return Ok(Self { name: name.to_owned(), store });
        }
        let opened = match Store::open(store.clone()) {
            // Only for errors of the file: any other error would also occur with an anonymous pool.
            Err(StoreError::Memory(error)) if is_pool_file_error(&error) => {
                let error: &dyn std::error::Error = &*error;
                tracing::warn!(
                    tenant = name,
                    error,
                    "cannot create the pool in pool_directory; blocks in DRAM do not survive a \
                     crash of the node"
                );
                Store::open(StoreConfig { pool_file: None, ..store })
            }
            opened => opened,
        };
        let store =
            opened.map_err(|source| TenantError::Store { tenant: name.to_owned(), source })?;
        Ok(Self { name: name.to_owned(), store })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Removes all blocks of this tenant from all tiers and zeroes their memory. Meanwhile puts
    /// fail and reads miss; afterwards the tenant can be used again.
    ///
    /// Waits up to `time` for memory that clients hold: a read in flight must not return zeroes.
    pub fn forget(&self, time: Duration) -> Result<Receipt, StoreError> {
        let began = SystemClock.unix_ms();
        let erased =
            self.store.erase(CallOptions { timeout: Some(time), ..CallOptions::default() })?;
        Ok(Receipt::new(&self.name, began, erased))
    }
}

/// All tenants of a node, the default one first.
#[derive(Debug)]
pub struct Tenants {
    all: Vec<Arc<Tenant>>,
    /// By user id: index into `all`.
    users: BTreeMap<u32, usize>,
    tokens: Tokens,
    /// The GPU that holds the blocks, if it is not DRAM.
    gpu: Option<NodeGpu>,
    /// Administrators besides the node's own user and root.
    administrators: Option<AdminGroup>,
}

impl Tenants {
    /// Opens the stores of the default tenant and of each configured tenant.
    ///
    /// # Errors
    /// A tenant is ambiguous or invalid (checked before any store is opened), or a store cannot be
    /// opened.
    pub fn open(config: &NodeConfig) -> Result<Self, TenantError> {
        Self::open_for(config, rustix::process::geteuid().as_raw())
    }

    fn open_for(config: &NodeConfig, own_user: u32) -> Result<Self, TenantError> {
        let name = |place: usize| match place {
            0 => DEFAULT_TENANT.to_owned(),
            place => config.tenants[place - 1].name.clone(),
        };
        let ambiguous = |one: usize, other: usize, reason: &str| TenantError::Ambiguous {
            one: name(one),
            other: name(other),
            reason: reason.to_owned(),
        };
        // The node's own user has its place before any tenant, so no tenant can take it.
        let mut users = BTreeMap::from([(own_user, 0)]);
        let mut tokens = Tokens::new();
        for (at, tenant) in config.tenants.iter().enumerate() {
            let place = at + 1;
            if let Some(taken) = (0..place).find(|other| name(*other) == tenant.name) {
                return Err(ambiguous(taken, place, "they have the same name"));
            }
            if tenant.users.is_empty() && tenant.token_file.is_none() {
                return Err(TenantError::NoIdentity { tenant: tenant.name.clone() });
            }
            for user in &tenant.users {
                // A user that one tenant lists twice is not ambiguous.
                if let Some(other) = users.insert(*user, place).filter(|other| *other != place) {
                    let reason = format!(
                        "both have user {user}; a user belongs to one tenant (the node's own user \
                         to {DEFAULT_TENANT:?}), use a token_file for the other"
                    );
                    return Err(ambiguous(other, place, &reason));
                }
            }
            if let Some(path) = &tenant.token_file {
                let token = Token::read(path)
                    .map_err(|source| TenantError::Token { tenant: name(place), source })?;
                // Searched before it is added, when only the tokens of other tenants are there.
                if let Some(other) = tokens.find(token.bytes()) {
                    return Err(ambiguous(other, place, "they have the same token"));
                }
                tokens.add(&token, place);
            }
        }
        // The last check: no store is opened for a configuration that is refused.
        check_directories(config, &ambiguous)?;
        let open_gpu =
            |gpu: &String| NodeGpu::open(gpu, config.store.dram_bytes, config.gpu_reserve_bytes);
        let gpu = config.gpu.as_ref().map(open_gpu).transpose()?;
        let own = Tenant::open(
            DEFAULT_TENANT,
            config.store.clone(),
            config.encryption_key_file.as_ref(),
            config,
            gpu.as_ref(),
        )?;
        let mut all = vec![Arc::new(own)];
        for tenant in &config.tenants {
            let key = tenant.encryption_key_file.as_ref();
            // A node in the memory of a GPU has no other tenants.
            let store = tenant.store.clone();
            all.push(Arc::new(Tenant::open(&tenant.name, store, key, config, None)?));
        }
        Ok(Self { all, users, tokens, gpu, administrators: config.admin_group.clone() })
    }

    /// All tenants, the default one first.
    pub fn all(&self) -> &[Arc<Tenant>] {
        &self.all
    }

    /// The GPU that holds the blocks, if it is not DRAM.
    pub(crate) fn gpu(&self) -> Option<&NodeGpu> {
        self.gpu.as_ref()
    }

    /// A tenant by its name.
    pub fn by_name(&self, name: &str) -> Option<&Arc<Tenant>> {
        self.all.iter().find(|tenant| tenant.name == name)
    }

    /// Whether a user belongs to a tenant without a token.
    pub(crate) fn has_user(&self, user: u32) -> bool {
        self.users.contains_key(&user)
    }

    /// Whether a peer may administer the whole node as root or by `admin_group`. The node's own
    /// user may as well, as it belongs to the default tenant.
    pub(crate) fn is_administrator(&self, user: u32, group: u32) -> bool {
        let is_listed =
            || self.administrators.as_ref().is_some_and(|admins| admins.includes(user, group));
        user == ROOT_USER || is_listed()
    }

    /// Whether any tenant has a token.
    pub(crate) fn has_tokens(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// The tenant for which a peer administers: the default tenant, and with it the whole node, for
    /// root, the node's own user and members of `admin_group`; otherwise the peer's own tenant. A
    /// token selects its tenant, whichever user sends it.
    pub fn identify_administrator(
        &self,
        user: u32,
        group: u32,
        token: Option<&[u8]>,
    ) -> Result<Arc<Tenant>, Refusal> {
        // A token has precedence, so that an administrator can select a tenant.
        if token.is_none() && self.is_administrator(user, group) {
            return Ok(Arc::clone(&self.all[0]));
        }
        self.identify(user, token).map_err(|refusal| match refusal {
            Refusal::User { user } => Refusal::Administrator { user },
            other => other,
        })
    }

    /// The tenant of a peer: by its token if it sends one, otherwise by its user. A wrong token is
    /// an error even if the user belongs to a tenant. Root is treated like any other user.
    pub fn identify(&self, user: u32, token: Option<&[u8]>) -> Result<Arc<Tenant>, Refusal> {
        let place = match token {
            Some(token) => self.tokens.find(token).ok_or(Refusal::Token)?,
            None => *self.users.get(&user).ok_or(Refusal::User { user })?,
        };
        Ok(Arc::clone(&self.all[place]))
    }
}

/// The path of a tenant's pool file. It is unique for each user, socket and tenant, and the next
/// node at that socket finds it again.
///
/// Only the default tenant has one. A file with a name cannot be sealed against truncation: another
/// user with its descriptor could truncate it and crash the node with SIGBUS.
pub(crate) fn pool_file(node: &NodeConfig, tenant: &str) -> Option<PathBuf> {
    if tenant != DEFAULT_TENANT {
        return None;
    }
    let directory = node.pool_directory.as_ref()?;
    // Absolute, so that the working directory at the start does not matter.
    let socket = std::path::absolute(&node.socket).unwrap_or_else(|_| node.socket.clone());
    // A hash, because a path has separators and may be longer than a file name.
    let hash = digest(&SHA256, socket.as_os_str().as_bytes());
    let socket_id = hash
        .as_ref()
        .iter()
        .take(6)
        .fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    let user = rustix::process::geteuid().as_raw();
    Some(directory.join(format!("cascade-{user}-{socket_id}-{tenant}.pool")))
}

/// Whether an error concerns the pool's file only (its directory is missing or too small), so that
/// an anonymous pool may succeed.
fn is_pool_file_error(error: &MemoryError) -> bool {
    matches!(error, MemoryError::NotReserved { .. } | MemoryError::Named { .. })
}

/// Rejects two tenants with the same directory.
fn check_directories(
    config: &NodeConfig,
    ambiguous: &dyn Fn(usize, usize, &str) -> TenantError,
) -> Result<(), TenantError> {
    let stores = [&config.store].into_iter().chain(config.tenants.iter().map(|it| &it.store));
    let mut taken = BTreeMap::new();
    for (place, store) in stores.enumerate() {
        let Some(files) = &store.files else { continue };
        // Two paths can lead to the same directory, for example by a symbolic link. A directory
        // that does not exist yet is compared as it is written.
        let directory = files.directory.canonicalize().unwrap_or_else(|_| files.directory.clone());
        if let Some(other) = taken.insert(directory, place) {
            let reason = format!("both have the files directory {}", files.directory.display());
            return Err(ambiguous(other, place, &reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
