//! Limits a status to what its reader may see: everything, one tenant, or totals.

use serde::{Deserialize, Serialize};

use crate::ClientSnapshot;
use crate::status::{
    CatalogStatus, ClientsStatus, EvictionStatus, GetStatus, HealthState, HealthStatus, HitRate,
    LookupStatus, MoverStatus, PoolStatus, PutStatus, Status, TenantStatus, TierStatus,
    WarmRestartStatus,
};
use crate::tenants::{DEFAULT_TENANT, Tenant, Tenants};

/// The tenant name in totals.
pub const ALL_TENANTS: &str = "all tenants";

/// The part of a node's status that its reader may see.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StatusView {
    /// Everything: for the node's own user, root, members of `admin_group`, and clients with the
    /// node's token or a certificate.
    #[default]
    All,
    /// One tenant's store and clients.
    Tenant(String),
    /// Sums over the process, without names of tenants and clients and without keys: for all.
    Totals,
}

impl StatusView {
    /// What a tenant may see. The default tenant sees everything.
    pub fn of_tenant(tenant: &Tenant) -> Self {
        match tenant.name() {
            DEFAULT_TENANT => Self::All,
            name => Self::Tenant(name.to_owned()),
        }
    }

    /// What the peer of a Unix socket may see. The kernel reports its UID and GID.
    pub(crate) fn of_peer(tenants: &Tenants, user: u32, group: u32) -> Self {
        let is_own_user = user == rustix::process::geteuid().as_raw();
        if is_own_user || tenants.is_administrator(user, group) {
            return Self::All;
        }
        let tenant = tenants.identify(user, None);
        tenant.map_or(Self::Totals, |tenant| Self::of_tenant(&tenant))
    }
}

impl Status {
    /// This status of a node with these clients, limited to a view.
    pub(crate) fn seen_by(mut self, view: &StatusView, mut clients: Vec<ClientSnapshot>) -> Self {
        match view {
            StatusView::All => {}
            StatusView::Tenant(name) => {
                clients.retain(|client| client.tenant == *name);
                self.tenants.retain(|tenant| tenant.name == *name);
                self.clients = ClientsStatus::of(&clients, 0);
                // These counters cover the requests of all tenants.
                self.server = crate::traffic::Traffic::default().status();
                self.traces = None;
                self.cluster = None;
                self.notes.clear();
            }
            StatusView::Totals => {
                self.tenants = vec![TenantStatus::total(&self.tenants)];
                self.clients.list.clear();
                self.cluster = None;
                self.notes.clear();
            }
        }
        self.view = view.clone();
        self
    }
}

/// Adds every field of a struct of counts. The pattern must name all fields, so the compiler
/// reports a missing one.
macro_rules! add_fields {
    ($into:expr, $from:expr, $struct:ident { $($field:ident),+ $(,)? }) => {{
        let $struct { $($field),+ } = $from;
        $($into.$field += *$field;)+
    }};
}

impl TenantStatus {
    /// The sum of all tenants, without names, keys and paths.
    pub(crate) fn total(tenants: &[Self]) -> Self {
        let mut total = Self { name: ALL_TENANTS.to_owned(), ..Self::default() };
        for tenant in tenants {
            total.add(tenant);
        }
        let HitRate { requested_blocks, matched_blocks, .. } = total.hit_rate;
        total.hit_rate = HitRate::of(requested_blocks, matched_blocks);
        total
    }

    fn add(&mut self, other: &Self) {
        let Self {
            name: _,
            hit_rate,
            lookups,
            gets,
            puts,
            tiers,
            mover,
            evictions,
            damaged_blocks,
            catalog,
            lock_hold_s,
            pool,
            // Predictions for one tenant's tier cannot be added to those of another.
            shadows: _,
            hot_prefixes: _,
            warm_restart,
            notes: _,
        } = other;
        self.hit_rate.requested_blocks += hit_rate.requested_blocks;
        self.hit_rate.matched_blocks += hit_rate.matched_blocks;
        add_fields!(
            self.lookups,
            lookups,
            LookupStatus { requests, requested_blocks, matched_blocks }
        );
        add_fields!(self.gets, gets, GetStatus { blocks, hits, misses, failures, shed, bytes });
        add_fields!(
            self.puts,
            puts,
            PutStatus {
                blocks,
                stored,
                deduplicated,
                present,
                conflicts,
                declined,
                failures,
                bytes
            }
        );
        self.add_mover(mover);
        add_fields!(
            self.evictions,
            evictions,
            EvictionStatus { blocks, bytes, lost_blocks, reclaimed_blocks }
        );
        self.damaged_blocks += damaged_blocks;
        add_fields!(
            self.catalog,
            catalog,
            CatalogStatus {
                keys,
                contents,
                content_bytes,
                memory_bytes,
                protected_blocks,
                protection_refused
            }
        );
        self.lock_hold_s.add(lock_hold_s);
        self.add_pool(pool);
        for tier in tiers {
            self.add_tier(tier);
        }
        self.add_warm_restart(warm_restart.as_ref());
    }

    fn add_mover(&mut self, mover: &MoverStatus) {
        add_fields!(
            self.mover,
            mover,
            MoverStatus {
                demoted_blocks,
                demoted_bytes,
                promoted_blocks,
                promoted_bytes,
                pending_bytes,
                demote_failures,
                demote_declines,
                name_failures,
                prefetched_blocks,
                prefetched_used_blocks
            }
        );
    }

    fn add_pool(&mut self, pool: &PoolStatus) {
        let largest = self.pool.largest_free_bytes.max(pool.largest_free_bytes);
        add_fields!(
            self.pool,
            pool,
            PoolStatus {
                capacity_bytes,
                reserved_bytes,
                requested_bytes,
                free_bytes,
                largest_free_bytes,
                huge_bytes
            }
        );
        self.pool.largest_free_bytes = largest;
    }

    fn add_warm_restart(&mut self, warm_restart: Option<&WarmRestartStatus>) {
        if let Some(WarmRestartStatus {
            recovered_blocks,
            recovered_bytes,
            rejected_records,
            recover_s,
        }) = warm_restart
        {
            let sum = self.warm_restart.get_or_insert_default();
            sum.recovered_blocks += recovered_blocks;
            sum.recovered_bytes += recovered_bytes;
            sum.rejected_records += rejected_records;
            sum.recover_s += recover_s;
        }
    }

    fn add_tier(&mut self, tier: &TierStatus) {
        // The pattern names all fields, so that a new one is not forgotten in the totals.
        let TierStatus {
            name,
            capacity_bytes,
            used_bytes,
            blocks,
            files,
            hits,
            hit_bytes,
            matched_blocks,
            damaged_blocks,
            damaged_structures,
            health,
            // That of one tenant.
            encryption: _,
            notes: _,
        } = tier;
        let known = self.tiers.iter().position(|one| one.name == *name);
        let at = known.unwrap_or_else(|| {
            self.tiers.push(TierStatus { name: name.clone(), ..TierStatus::default() });
            self.tiers.len() - 1
        });
        let sum = &mut self.tiers[at];
        sum.capacity_bytes += capacity_bytes;
        sum.used_bytes += used_bytes;
        sum.blocks = add_optional(sum.blocks, *blocks);
        sum.files = add_optional(sum.files, *files);
        sum.hits += hits;
        sum.hit_bytes += hit_bytes;
        sum.matched_blocks += matched_blocks;
        sum.damaged_blocks += damaged_blocks;
        sum.damaged_structures += damaged_structures;
        if let Some(health) = health {
            sum.health.get_or_insert_default().add(health);
        }
    }
}

impl HealthStatus {
    /// Adds another tier's health: the sum is healthy only if all are.
    fn add(&mut self, other: &Self) {
        // The last error may contain a tenant's directory.
        let Self { state, since_s, opened, stuck_calls, last_error: _, reads, writes } = other;
        if self.state == HealthState::Healthy {
            (self.state, self.since_s) = (*state, *since_s);
        }
        for (sum, direction) in [(&mut self.reads, reads), (&mut self.writes, writes)] {
            if *sum == HealthState::Healthy {
                *sum = *direction;
            }
        }
        self.opened += opened;
        self.stuck_calls += stuck_calls;
    }
}

fn add_optional(sum: Option<u64>, value: Option<u64>) -> Option<u64> {
    value.map(|value| sum.unwrap_or(0) + value).or(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::AdminGroup;
    use crate::{Node, NodeConfig};

    /// Totals left out damaged structures and the state by direction. So without a token,
    /// `cascade_tier_damaged_structures_total` and `cascade_tier_circuit_open` were always 0.
    #[test]
    fn totals_contain_every_figure_of_a_tier() {
        let tier = |count, writes| TierStatus {
            name: "files".to_owned(),
            capacity_bytes: count,
            used_bytes: count,
            blocks: Some(count),
            files: Some(count),
            hits: count,
            hit_bytes: count,
            matched_blocks: count,
            damaged_blocks: count,
            damaged_structures: count,
            health: Some(HealthStatus {
                state: writes,
                since_s: 0.0,
                opened: count,
                stuck_calls: count,
                last_error: None,
                reads: HealthState::Healthy,
                writes,
            }),
            encryption: None,
            notes: vec![],
        };
        let of = |tier| TenantStatus { tiers: vec![tier], ..TenantStatus::default() };
        let [healthy, open] = [HealthState::Healthy, HealthState::Open];
        for (first, second) in [(healthy, open), (open, healthy)] {
            let tenants = [of(tier(1, first)), of(tier(20, second))];
            assert_eq!(TenantStatus::total(&tenants).tiers, [tier(21, open)]);
        }
    }

    /// HTTP counted only users that `/etc/group` lists as members, and showed totals to a user
    /// whose primary group is `admin_group`.
    #[test]
    fn a_user_whose_primary_group_is_the_admin_group_sees_everything() {
        let directory = tempfile::tempdir().unwrap();
        let mut config = NodeConfig::new(directory.path().join("cascade.sock"));
        config.store.dram_bytes = 4 << 20;
        config.store.huge_pages = false;
        config.admin_group = Some(AdminGroup { gid: 700, members: vec![4710] });
        let node = Node::open(config).unwrap();
        assert_eq!(
            StatusView::of_peer(node.tenants(), 4711, 700),
            StatusView::All,
            "primary group"
        );
        assert_eq!(
            StatusView::of_peer(node.tenants(), 4710, 100),
            StatusView::All,
            "listed member"
        );
        assert_eq!(StatusView::of_peer(node.tenants(), 4711, 100), StatusView::Totals);
    }
}
