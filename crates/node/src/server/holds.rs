//! The holds of one client, with their records in the tenant's ledger.

use std::ops::Range;
use std::sync::Arc;

use cascade_store::HeldId;
use cascade_store::holds::{Hold, HoldGuard};
use cascade_wire::HoldRange;

use crate::tenants::Tenant;

pub(super) use cascade_store::holds::{HeldMemory, counted_bytes};

/// A granted hold of a client.
pub(super) type ClientHold = Hold<LedgerGuard>;

/// The holds of a client.
pub(super) type Holds = cascade_store::holds::Holds<LedgerGuard>;

/// The record of a hold in the tenant's ledger. While it exists, the next run of the node does not
/// reuse the memory. It is removed on drop.
#[derive(Debug)]
pub(super) struct LedgerGuard {
    tenant: Arc<Tenant>,
    id: Option<HeldId>,
}

impl LedgerGuard {
    pub(super) fn new(tenant: Arc<Tenant>, id: HeldId) -> Self {
        Self { tenant, id: Some(id) }
    }
}

impl HoldGuard for LedgerGuard {
    /// Removes the records of one session, and so of one tenant. Takes the ledger's lock once;
    /// dropping the guards would take it for each.
    fn release_all(guards: impl IntoIterator<Item = Self>) {
        let mut tenant = None;
        // `take` leaves nothing for the drop of the guard, which would take the lock again.
        let mut id_of = |mut guard: Self| {
            tenant.get_or_insert_with(|| Arc::clone(&guard.tenant));
            guard.id.take()
        };
        // All guards have the same tenant, so one store gets all ids.
        let ids: Vec<HeldId> = guards.into_iter().filter_map(&mut id_of).collect();
        if let Some(tenant) = tenant {
            tenant.store().release_held(ids);
        }
    }

    fn keep(mut self) {
        // Without its id, the guard removes no record when it is dropped.
        self.id = None;
    }
}

impl Drop for LedgerGuard {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.tenant.store().release_held([id]);
        }
    }
}

/// The numbers of a range.
pub(super) fn hold_numbers(range: HoldRange) -> Range<u64> {
    range.first..range.first.saturating_add(u64::from(range.count))
}
