//! Access rules that a reload replaces.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};

use super::access::HttpAccess;
use super::error::HttpError;
use super::security::Secrets;
use crate::config::SecurityConfig;

/// The access rules of a running HTTP server. A reload replaces them. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct ReloadableAccess {
    address: SocketAddr,
    current: Arc<RwLock<Arc<HttpAccess>>>,
}

impl ReloadableAccess {
    pub(super) fn new(address: SocketAddr, secrets: Secrets) -> Self {
        let current = Arc::new(RwLock::new(Arc::new(HttpAccess::new(address, secrets))));
        Self { address, current }
    }

    /// The address of the port.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn current(&self) -> Arc<HttpAccess> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the token and the certificates again. After an error the old ones stay in use.
    pub(crate) fn reload(&self, security: &SecurityConfig) -> Result<(), HttpError> {
        security.check(Some(self.address))?;
        // Complete before the swap, so that no request gets a part of the new rules.
        let access = Arc::new(HttpAccess::new(self.address, Secrets::read(security)?));
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = access;
        if security.token_file.is_some() || security.certificate.is_some() {
            tracing::info!(address = %self.address, "token and certificates reloaded");
        }
        Ok(())
    }
}
