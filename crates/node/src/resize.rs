//! Changes the capacities of the tenants' tiers while the node runs.

use cascade_block::ByteSize;
use cascade_store::{CallOptions, Store, StoreError};
use thiserror::Error;

use crate::NodeConfig;
use crate::server::{ClientSessions, pinning_client};
use crate::tenants::{DEFAULT_TENANT, Tenant, Tenants};

/// The settings that are capacities.
pub(crate) const DRAM: &str = "dram";
pub(crate) const FILES_CAPACITY: &str = "files_capacity";

/// Why a capacity did not change, or not in full.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// The store refused the new capacity.
    #[error("{key} of tenant {tenant:?} does not change")]
    Refused {
        /// The setting.
        key: &'static str,
        /// The tenant.
        tenant: String,
        /// Why.
        #[source]
        source: StoreError,
    },
    /// A client may have registered the pool with a device.
    #[error(
        "dram of tenant {tenant:?} does not change: {client}, so that it may have registered the \
         pool with a device, which keeps its memory; stop that client, or set dram in the \
         configuration file and restart the node"
    )]
    Pinned {
        /// The tenant.
        tenant: String,
        /// The client.
        client: String,
    },
    /// The new size is above the one at start.
    #[error(
        "dram of tenant {tenant:?} can be at most {}, its size at the start; for more, set dram in \
         the configuration file and restart the node",
        ByteSize(*started_bytes)
    )]
    AboveStart {
        /// The tenant.
        tenant: String,
        /// The size at the start.
        started_bytes: u64,
    },
    /// Blocks in use have kept memory.
    #[error(
        "dram of tenant {tenant:?} is {} now: blocks that are pinned, in use by clients or not \
         written yet have the rest; set dram again once they are released",
        ByteSize(*capacity_bytes)
    )]
    Held {
        /// The tenant.
        tenant: String,
        /// The capacity that it has now.
        capacity_bytes: u64,
    },
}

/// Gives the tenants the capacities of `new` for the named settings. A tenant with a quota of its
/// own keeps it, whatever the setting of the node is.
///
/// # Errors
/// The first tenant whose capacity does not change; those before it have the new one.
pub(crate) fn resize(
    tenants: &Tenants,
    sessions: &ClientSessions,
    new: &NodeConfig,
    keys: &[String],
    options: CallOptions,
) -> Result<(), ResizeError> {
    for tenant in tenants.all() {
        let Some(capacities) = Capacities::of(new, tenant.name()) else { continue };
        if let Some(bytes) = capacities.dram_bytes.filter(|_| keys.iter().any(|key| key == DRAM)) {
            resize_dram(tenant, sessions, bytes, options)?;
        }
        let files = capacities.files_bytes.filter(|_| keys.iter().any(|key| key == FILES_CAPACITY));
        if let Some(bytes) = files {
            let refused = refused(FILES_CAPACITY, tenant);
            tenant.store().resize("files", bytes, options).map_err(refused)?;
        }
    }
    Ok(())
}

/// Whether a tenant that follows `dram` of the node would get more than its pool has had at the
/// start, so that the change needs a restart.
pub(crate) fn exceeds_start(tenants: &Tenants, new: &NodeConfig) -> bool {
    tenants.all().iter().any(|tenant| {
        let bytes = Capacities::of(new, tenant.name()).and_then(|its| its.dram_bytes);
        bytes.is_some_and(|bytes| bytes > started_bytes(tenant.store()))
    })
}

/// What the files of the tenants use above their new capacity, in words; none if they fit.
pub(crate) fn shrinking_files(tenants: &Tenants) -> Option<String> {
    let excess = tenants.all().iter().map(|tenant| {
        let stats = tenant.store().stats();
        let files = stats.stages.iter().find(|(name, _)| *name == "files");
        files.map_or(0, |(_, files)| files.used_bytes.saturating_sub(files.capacity_bytes))
    });
    let excess: u64 = excess.sum();
    (excess > 0).then(|| {
        format!(
            "the files shrink in the background: {} above the new capacity are being removed",
            ByteSize(excess).rounded()
        )
    })
}

/// The capacities that a configuration gives a tenant by the settings of the node.
struct Capacities {
    dram_bytes: Option<u64>,
    files_bytes: Option<u64>,
}

impl Capacities {
    fn of(config: &NodeConfig, name: &str) -> Option<Self> {
        let files_bytes = |store: &cascade_store::StoreConfig| {
            store.files.as_ref().map(|files| files.capacity_bytes)
        };
        if name == DEFAULT_TENANT {
            let store = &config.store;
            return Some(Self {
                dram_bytes: Some(store.dram_bytes),
                files_bytes: files_bytes(store),
            });
        }
        let tenant = config.tenants.iter().find(|tenant| tenant.name == name)?;
        let follows = |key| !config.has_quota(name, key);
        Some(Self {
            dram_bytes: Some(tenant.store.dram_bytes).filter(|_| follows("tenant.dram")),
            files_bytes: files_bytes(&tenant.store).filter(|_| follows("tenant.files_capacity")),
        })
    }
}

fn started_bytes(store: &Store) -> u64 {
    store.config().dram_bytes
}

fn refused(key: &'static str, tenant: &Tenant) -> impl FnOnce(StoreError) -> ResizeError {
    let tenant = tenant.name().to_owned();
    move |source| ResizeError::Refused { key, tenant, source }
}

fn resize_dram(
    tenant: &Tenant,
    sessions: &ClientSessions,
    bytes: u64,
    options: CallOptions,
) -> Result<(), ResizeError> {
    let (store, name) = (tenant.store(), || tenant.name().to_owned());
    let started_bytes = started_bytes(store);
    if bytes > started_bytes {
        return Err(ResizeError::AboveStart { tenant: name(), started_bytes });
    }
    // Or of the same size: memory that a client has allocated again then goes back, too.
    let is_smaller = bytes <= store.memory_bytes();
    // A pool that gets larger has lost no page that a client could have registered: when it got
    // smaller, no client could have registered one, or it is pinned.
    if let Some(client) = pinning_client(sessions, tenant).filter(|_| is_smaller) {
        return Err(ResizeError::Pinned { tenant: name(), client });
    }
    let resized = store.resize(DRAM, bytes, options);
    if is_smaller && pinning_client(sessions, tenant).is_some() {
        // A client has opened a device meanwhile, and may have registered pages before the pool
        // gave them back.
        store.pin_memory();
    }
    let capacity_bytes = resized.map_err(refused(DRAM, tenant))?;
    // A pool that gets larger gets whole pages, so it may be a little larger.
    if is_smaller && capacity_bytes > bytes {
        return Err(ResizeError::Held { tenant: name(), capacity_bytes });
    }
    Ok(())
}
