//! Builds a status from the statistics of stores and sessions.

use cascade_store::{
    HealthState as StoreHealth, HoldTimes, ShadowFigure, StoreCounters, StoreStats,
};

use crate::server::ClientSnapshot;
use crate::status::{
    CatalogStatus, ClientStatus, ClientsStatus, EvictionStatus, GetStatus, HealthState,
    HealthStatus, Histogram, HitRate, HotPrefix, LookupStatus, MoverStatus, PoolStatus, PutStatus,
    ShadowStatus, TenantStatus, TierStatus, WarmRestartStatus,
};

/// The name of the tier in the pool, in statistics without names.
const DRAM: &str = "dram";

impl TenantStatus {
    /// A tenant's status from the statistics of its store.
    pub fn of(name: &str, stats: &StoreStats, now_unix_ms: u64) -> Self {
        let counters = &stats.counters;
        Self {
            name: name.to_owned(),
            hit_rate: HitRate::of(counters.requested(), counters.matched()),
            lookups: LookupStatus {
                requests: counters.requests,
                requested_blocks: counters.blocks_requested,
                matched_blocks: counters.blocks_matched,
            },
            gets: GetStatus {
                blocks: counters.gets,
                hits: counters.hits,
                misses: counters.misses,
                failures: counters.get_failures,
                shed: counters.shed_gets,
                bytes: counters.bytes_read,
            },
            puts: puts(counters),
            tiers: tiers(stats, now_unix_ms),
            shadows: stats.shadows.iter().map(shadow).collect(),
            mover: mover(stats),
            evictions: EvictionStatus {
                blocks: counters.evicted_blocks,
                bytes: counters.evicted_bytes,
                lost_blocks: counters.lost_blocks,
                reclaimed_blocks: counters.reclaimed_blocks,
            },
            damaged_blocks: counters.damaged_blocks,
            catalog: CatalogStatus {
                keys: stats.keys,
                contents: stats.contents,
                content_bytes: stats.content_bytes,
                memory_bytes: stats.catalog_bytes,
                protected_blocks: stats.protected_blocks,
                protection_refused: stats.protection_refused,
            },
            lock_hold_s: lock_hold_s(&stats.lock_holds),
            pool: PoolStatus {
                capacity_bytes: stats.pool.capacity_bytes as u64,
                reserved_bytes: stats.pool.reserved_bytes as u64,
                requested_bytes: stats.pool.requested_bytes as u64,
                free_bytes: (stats.pool.free_bytes + stats.pool.magazine_bytes) as u64,
                largest_free_bytes: stats.pool.largest_free_bytes as u64,
                huge_bytes: stats.pool.huge_bytes as u64,
            },
            warm_restart: stats.warm.as_ref().map(|warm| WarmRestartStatus {
                recovered_blocks: warm.recovered_blocks,
                recovered_bytes: warm.recovered_bytes,
                rejected_records: warm.rejected_records,
                recover_s: seconds(warm.recover_ms),
            }),
            hot_prefixes: Vec::new(),
            notes: stats.notes.clone(),
        }
    }

    /// Adds the most requested prefixes.
    pub fn with_hot_prefixes(mut self, hot: &[cascade_store::HotPrefix]) -> Self {
        self.hot_prefixes = hot
            .iter()
            .map(|prefix| HotPrefix {
                key: prefix.key.to_string(),
                depth_blocks: u64::from(prefix.depth_blocks),
                requests: prefix.hits,
                resident_bytes: prefix.tiers.first().map_or(0, |tier| tier.bytes),
                tiers: prefix.tiers.iter().map(|tier| tier.tier.to_owned()).collect(),
            })
            .collect();
        self
    }
}

#[expect(clippy::cast_precision_loss, reason = "bounds and a sum for display")]
fn lock_hold_s(times: &HoldTimes) -> Histogram {
    Histogram {
        bounds: HoldTimes::BOUNDS_US.iter().map(|bound| *bound as f64 / 1e6).collect(),
        counts: times.counts.clone(),
        sum: times.sum_ns as f64 / 1e9,
    }
}

impl HitRate {
    /// The hit rate of these counts.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for display")]
    pub fn of(requested_blocks: u64, matched_blocks: u64) -> Self {
        let ratio = || matched_blocks as f64 / requested_blocks as f64;
        let ratio = (requested_blocks > 0).then(ratio);
        Self { requested_blocks, matched_blocks, ratio }
    }

    /// The hit rate of several stores together.
    pub fn sum<'a>(rates: impl IntoIterator<Item = &'a Self>) -> Self {
        let add = |(requested, matched): (u64, u64), one: &Self| {
            (requested + one.requested_blocks, matched + one.matched_blocks)
        };
        let (requested, matched) = rates.into_iter().fold((0, 0), add);
        Self::of(requested, matched)
    }

    /// The hit rate since an earlier status.
    pub fn since(&self, before: &Self) -> Self {
        Self::of(
            self.requested_blocks.saturating_sub(before.requested_blocks),
            self.matched_blocks.saturating_sub(before.matched_blocks),
        )
    }
}

fn puts(counters: &StoreCounters) -> PutStatus {
    PutStatus {
        blocks: counters.puts,
        stored: counters.stored,
        deduplicated: counters.deduplicated,
        present: counters.present,
        conflicts: counters.conflicts,
        declined: counters.declined,
        failures: counters.put_failures,
        bytes: counters.bytes_written,
    }
}

fn mover(stats: &StoreStats) -> MoverStatus {
    let counters = &stats.counters;
    MoverStatus {
        demoted_blocks: counters.demoted_blocks,
        demoted_bytes: counters.demoted_bytes,
        promoted_blocks: counters.promoted_blocks,
        promoted_bytes: counters.promoted_bytes,
        pending_bytes: stats.pending_bytes,
        demote_failures: counters.demote_failures,
        demote_declines: counters.demote_declines,
        name_failures: counters.name_failures,
        prefetched_blocks: counters.prefetched_blocks,
        prefetched_used_blocks: counters.prefetched_used,
    }
}

fn health_state(state: StoreHealth) -> HealthState {
    match state {
        StoreHealth::Healthy => HealthState::Healthy,
        StoreHealth::Open => HealthState::Open,
        StoreHealth::Probing => HealthState::Probing,
    }
}

/// The store's own memory, the stages below it, the sources and all else with hits, so that hits by
/// tier add up to hits.
fn tiers(stats: &StoreStats, now_unix_ms: u64) -> Vec<TierStatus> {
    let mut tiers = vec![TierStatus {
        name: stats.hits_by_tier.first().map_or(DRAM, |hits| hits.tier).to_owned(),
        capacity_bytes: stats.pool.capacity_bytes as u64,
        used_bytes: stats.dram_bytes,
        blocks: Some(stats.dram_blocks),
        ..TierStatus::default()
    }];
    let stages = stats.stages.iter().enumerate();
    tiers.extend(stages.map(|(at, (name, stage))| TierStatus {
        name: (*name).to_owned(),
        capacity_bytes: stage.capacity_bytes,
        used_bytes: stage.used_bytes,
        blocks: stats.stage_blocks.get(at).copied(),
        files: Some(stage.files),
        damaged_blocks: stage.damaged_blocks,
        damaged_structures: stage.damaged_structures,
        encryption: stage.encryption.clone(),
        notes: stage.notes.clone(),
        ..TierStatus::default()
    }));
    tiers.extend(stats.sources.iter().map(|(name, source)| TierStatus {
        name: (*name).to_owned(),
        damaged_blocks: source.damaged_blocks,
        ..TierStatus::default()
    }));
    let of_sources = stats.sources.iter().map(|(name, source)| (name, &source.health));
    let health = stats.health.iter().map(|(name, health)| (name, health)).chain(of_sources);
    for (name, health) in health {
        if let Some(tier) = tiers.iter_mut().find(|tier| tier.name == *name) {
            tier.health = Some(HealthStatus {
                state: health_state(health.state),
                since_s: seconds(now_unix_ms.saturating_sub(health.since_unix_ms)),
                opened: health.opened_count,
                stuck_calls: health.stuck_calls,
                last_error: health.last_error.clone(),
                reads: health_state(health.reads.state),
                writes: health_state(health.writes.state),
            });
        }
    }
    for source in &stats.hits_by_tier {
        let existing = tiers.iter().position(|tier| tier.name == source.tier);
        let at = existing.unwrap_or_else(|| {
            tiers.push(TierStatus { name: source.tier.to_owned(), ..TierStatus::default() });
            tiers.len() - 1
        });
        tiers[at].hits += source.blocks;
        tiers[at].hit_bytes += source.bytes;
        tiers[at].matched_blocks += source.matched_blocks;
    }
    tiers
}

#[expect(clippy::cast_precision_loss, reason = "seconds for display")]
fn seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1000.0
}

fn shadow(figure: &ShadowFigure) -> ShadowStatus {
    ShadowStatus {
        tier: figure.tier.to_owned(),
        capacity_percent: u32::try_from(figure.capacity_percent).unwrap_or(u32::MAX),
        capacity_bytes: figure.capacity_bytes,
        predicted_hit_rate: figure.recent.predicted_hit_rate(),
    }
}

/// Limit of the clients in the list. Those that hold most memory come first.
const CLIENTS_MAX: usize = 50;
/// After this time without a request, a client with leases counts as idle.
const IDLE_TIME: std::time::Duration = std::time::Duration::from_secs(60);

impl ClientsStatus {
    /// The status of these sessions. `reaped` is the number of clients that ended while they held
    /// leases or reservations.
    pub fn of(clients: &[ClientSnapshot], reaped: u64) -> Self {
        let is_idle = |client: &&ClientSnapshot| client.leases > 0 && client.idle > IDLE_TIME;
        let mut list: Vec<_> = clients.iter().map(ClientStatus::of).collect();
        list.sort_by_key(|client| {
            (std::cmp::Reverse(client.leased_bytes + client.reserved_bytes), client.pid)
        });
        let oldest = clients.iter().filter_map(|client| client.oldest_lease).max();
        let mut status = Self {
            connected: clients.len() as u64,
            stopped: list.iter().filter(|client| client.is_stopped).count() as u64,
            silent: clients.iter().filter(is_idle).count() as u64,
            leases: list.iter().map(|client| client.leases).sum(),
            leased_bytes: list.iter().map(|client| client.leased_bytes).sum(),
            reserved_bytes: list.iter().map(|client| client.reserved_bytes).sum(),
            oldest_lease_s: oldest.map(|age| age.as_secs_f64()),
            reaped,
            list,
        };
        status.list.truncate(CLIENTS_MAX);
        status
    }
}

impl ClientStatus {
    fn of(client: &ClientSnapshot) -> Self {
        let holds_memory = client.leases + client.reservations > 0;
        Self {
            pid: u32::try_from(client.process).unwrap_or(0),
            name: client.name.clone(),
            tenant: client.tenant.clone(),
            leases: client.leases as u64,
            leased_bytes: client.leased_bytes,
            reserved_bytes: client.reserved_bytes,
            oldest_lease_s: client.oldest_lease.map(|age| age.as_secs_f64()),
            silent_s: client.idle.as_secs_f64(),
            // Checked only for clients that hold memory: it reads a file in `/proc` for each.
            is_stopped: holds_memory && is_stopped(client.process),
        }
    }
}

/// Whether a signal stopped a process.
fn is_stopped(process: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The state follows the name in parentheses. The name may contain parentheses itself, so the
    // last one counts.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('T' | 't'))
}
