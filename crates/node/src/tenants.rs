//! Tenants: identities with a store each.

use std::sync::Arc;

use cascade_store::Store;

/// One tenant.
#[derive(Debug)]
pub struct Tenant {
    name: String,
    store: Store,
}

impl Tenant {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its store.
    pub fn store(&self) -> &Store {
        &self.store
    }
}

/// Why a client is no tenant.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

/// All tenants of a node.
#[derive(Debug)]
pub struct Tenants(Vec<Arc<Tenant>>);

impl Tenants {
    /// The default tenant alone.
    pub fn of_default(store: Store) -> Self {
        Self(vec![Arc::new(Tenant { name: "default".to_owned(), store })])
    }

    /// All of them.
    pub fn all(&self) -> &[Arc<Tenant>] {
        &self.0
    }

    /// The tenant that a peer is.
    pub fn identify(&self, _user: u32, _token: Option<&[u8]>) -> Result<Arc<Tenant>, Refusal> {
        Ok(Arc::clone(&self.0[0]))
    }
}
