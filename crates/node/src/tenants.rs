//! Tenants: identities with a store each; a client is bound to exactly one when it connects.
//!
//! Who a client is, the kernel says (the user at the other end of the socket) or a token proves.
//! It gets the descriptor of its tenant's pool and of no other, so what one tenant has cannot be
//! hit, probed, read or evicted by another, whatever keys and namespaces it makes up.

mod identity;
mod receipt;

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cascade_block::{Clock as _, SystemClock};
use cascade_memory::MemoryError;
use cascade_store::{CallOptions, EncryptionConfig, SecretError, Store, StoreConfig, StoreError};
use ring::digest::{SHA256, digest};
use thiserror::Error;

pub use self::receipt::{Leftover, MemoryReceipt, Receipt, TierReceipt};

use self::identity::{Token, Tokens};
use crate::NodeConfig;
use crate::config::AdminGroup;

/// The user that may do everything on this host anyway.
const ROOT: u32 = 0;

/// The tenant of the node's own user.
pub const DEFAULT: &str = "default";

/// Why the tenants of a configuration cannot be served.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TenantError {
    /// A store could not be opened.
    #[error("cannot open the store of tenant {tenant:?}")]
    Store {
        /// Whose.
        tenant: String,
        /// Why.
        #[source]
        source: StoreError,
    },
    /// A token's file was not taken.
    #[error("cannot take the token of tenant {tenant:?}")]
    Token {
        /// Whose.
        tenant: String,
        /// Why.
        #[source]
        source: SecretError,
    },
    /// Who is which tenant is not certain.
    #[error("tenants {one:?} and {other:?}: {reason}")]
    Ambiguous {
        /// One of them.
        one: String,
        /// The other.
        other: String,
        /// What they share.
        reason: String,
    },
    /// Nobody could be this tenant.
    #[error("nobody can be tenant {tenant:?}; give it users of this host or a token_file")]
    Nobody {
        /// Which.
        tenant: String,
    },
}

/// Why a client is no tenant. Says the same of every token that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No tenant has this token.
    #[error("the token is no tenant's; check the client's token_file against the node's")]
    Token,
    /// This user may neither administer the node nor is it a tenant's.
    #[error(
        "user {user} may not administer this node: run the command as the node's own user or as \
         root, or put the user into the group that admin_group names"
    )]
    Administrator {
        /// The user's number.
        user: u32,
    },
    /// No tenant has this user, and there is no token.
    #[error(
        "user {user} is no tenant of this node; present a tenant's token, or add \
         `users = [{user}]` to a [[tenant]] of the node's configuration and restart it; to \
         administer the node, put the user into the group that admin_group names"
    )]
    User {
        /// The user's number.
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
    ) -> Result<Self, TenantError> {
        store.keep_pool = node.keep_pool;
        store.pool_file = pool_file(node, name);
        if let Some(key_file) = key {
            let key_file = key_file.clone();
            store.encryption = Some(EncryptionConfig { key_file, scope: name.to_owned() });
        }
        let opened = match Store::open(store.clone()) {
            Err(StoreError::Memory(error)) if is_placeless(&error) => {
                let error: &dyn std::error::Error = &*error;
                tracing::warn!(
                    tenant = name,
                    error,
                    "the pool has no place of its own: a crash of the node loses what is in DRAM"
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

    /// Removes everything that this tenant has, in all tiers, and zeroes what held it. Puts are
    /// refused meanwhile and reads are misses; it can be used again afterwards.
    ///
    /// Waits up to `time` for what clients hold: a reader that is under way must not find zeroes.
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
    /// Places in `all`.
    users: BTreeMap<u32, usize>,
    tokens: Tokens,
    /// Who administers the node beside its own user and root.
    administrators: Option<AdminGroup>,
}

impl Tenants {
    /// Opens a store for the default tenant and one for each that is configured; refuses what
    /// would leave a doubt who is who before any store is opened.
    pub fn open(config: &NodeConfig) -> Result<Self, TenantError> {
        Self::open_for(config, rustix::process::geteuid().as_raw())
    }

    fn open_for(config: &NodeConfig, own_user: u32) -> Result<Self, TenantError> {
        let name = |place: usize| match place {
            0 => DEFAULT.to_owned(),
            place => config.tenants[place - 1].name.clone(),
        };
        let ambiguous = |one: usize, other: usize, reason: &str| TenantError::Ambiguous {
            one: name(one),
            other: name(other),
            reason: reason.to_owned(),
        };
        let mut users = BTreeMap::from([(own_user, 0)]);
        let mut tokens = Tokens::new();
        for (at, tenant) in config.tenants.iter().enumerate() {
            let place = at + 1;
            if let Some(taken) = (0..place).find(|other| name(*other) == tenant.name) {
                return Err(ambiguous(taken, place, "they have one name"));
            }
            if tenant.users.is_empty() && tenant.token_file.is_none() {
                return Err(TenantError::Nobody { tenant: tenant.name.clone() });
            }
            for user in &tenant.users {
                if let Some(other) = users.insert(*user, place).filter(|other| *other != place) {
                    let reason = format!(
                        "user {user} would be both; a user is one tenant (the node's own user is \
                         {DEFAULT:?}), tell others apart by token_file"
                    );
                    return Err(ambiguous(other, place, &reason));
                }
            }
            if let Some(path) = &tenant.token_file {
                let token = Token::read(path)
                    .map_err(|source| TenantError::Token { tenant: name(place), source })?;
                if let Some(other) = tokens.find(token.bytes()) {
                    return Err(ambiguous(other, place, "they have the same token"));
                }
                tokens.add(&token, place);
            }
        }
        check_directories(config, &ambiguous)?;
        let own = Tenant::open(
            DEFAULT,
            config.store.clone(),
            config.encryption_key_file.as_ref(),
            config,
        )?;
        let mut all = vec![Arc::new(own)];
        for tenant in &config.tenants {
            let key = tenant.encryption_key_file.as_ref();
            all.push(Arc::new(Tenant::open(&tenant.name, tenant.store.clone(), key, config)?));
        }
        Ok(Self { all, users, tokens, administrators: config.admin_group.clone() })
    }

    /// All of them, the default one first.
    pub fn all(&self) -> &[Arc<Tenant>] {
        &self.all
    }

    /// A tenant by its name.
    pub fn named(&self, name: &str) -> Option<&Arc<Tenant>> {
        self.all.iter().find(|tenant| tenant.name == name)
    }

    /// Whether a user is a tenant without a token.
    pub(crate) fn has_user(&self, user: u32) -> bool {
        self.users.contains_key(&user)
    }

    /// Whether a peer may administer the whole node: root and the group of `admin_group`. The
    /// node's own user is the default tenant's.
    pub(crate) fn is_administrator(&self, user: u32, group: u32) -> bool {
        let is_listed =
            || self.administrators.as_ref().is_some_and(|known| known.includes(user, group));
        user == ROOT || is_listed()
    }

    /// Whether anybody can be a tenant by a token.
    pub(crate) fn have_tokens(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// For whom a peer that wants to administer asks: for the whole node (as its own tenant) if it
    /// is root, the node's own user or of `admin_group`; else for the tenant that it is. A
    /// token is that of its tenant, whoever presents it.
    pub fn identify_administrator(
        &self,
        user: u32,
        group: u32,
        token: Option<&[u8]>,
    ) -> Result<Arc<Tenant>, Refusal> {
        if token.is_none() && self.is_administrator(user, group) {
            return Ok(Arc::clone(&self.all[0]));
        }
        self.identify(user, token).map_err(|refusal| match refusal {
            Refusal::User { user } => Refusal::Administrator { user },
            other => other,
        })
    }

    /// The tenant that a peer is: the one whose token it presents, whoever its user is, else the
    /// one that its user is. A wrong token is never overlooked. Root is no exception.
    pub fn identify(&self, user: u32, token: Option<&[u8]>) -> Result<Arc<Tenant>, Refusal> {
        let place = match token {
            Some(token) => self.tokens.find(token).ok_or(Refusal::Token)?,
            None => *self.users.get(&user).ok_or(Refusal::User { user })?,
        };
        Ok(Arc::clone(&self.all[place]))
    }
}

/// Where a tenant's pool lies: a name of its own for each user, socket and tenant, found again by
/// the next node at that socket. Only the node's own user has one: a file with a name cannot be
/// sealed, so whoever else had its descriptor could truncate it and end the node by SIGBUS.
pub(crate) fn pool_file(node: &NodeConfig, tenant: &str) -> Option<PathBuf> {
    if tenant != DEFAULT {
        return None;
    }
    let directory = node.pool_directory.as_ref()?;
    let socket = std::path::absolute(&node.socket).unwrap_or_else(|_| node.socket.clone());
    let hash = digest(&SHA256, socket.as_os_str().as_bytes());
    let place = hash
        .as_ref()
        .iter()
        .take(6)
        .fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    let user = rustix::process::geteuid().as_raw();
    Some(directory.join(format!("cascade-{user}-{place}-{tenant}.pool")))
}

/// Whether a pool could be made, if it had no name: the directory is missing or too small.
fn is_placeless(error: &MemoryError) -> bool {
    matches!(error, MemoryError::NotReserved { .. } | MemoryError::Named { .. })
}

/// No two tenants write to one directory.
fn check_directories(
    config: &NodeConfig,
    ambiguous: &dyn Fn(usize, usize, &str) -> TenantError,
) -> Result<(), TenantError> {
    let stores = [&config.store].into_iter().chain(config.tenants.iter().map(|it| &it.store));
    let mut taken = BTreeMap::new();
    for (place, store) in stores.enumerate() {
        let Some(files) = &store.files else { continue };
        let directory = files.directory.canonicalize().unwrap_or_else(|_| files.directory.clone());
        if let Some(other) = taken.insert(directory, place) {
            let reason = format!("both have the directory {}", files.directory.display());
            return Err(ambiguous(other, place, &reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
