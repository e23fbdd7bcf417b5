//! How a status is made from what a store and the kernel say.

use cascade_store::{Counters, Stats};

use crate::status::{
    CatalogStatus, EvictionStatus, GetStatus, LookupStatus, MoverStatus, PoolStatus, PutStatus,
    TenantStatus, TierStatus,
};

/// The name of the tier that the pool is.
const DRAM: &str = "dram";

impl TenantStatus {
    /// A tenant's status from its store's statistics.
    pub fn of(name: &str, stats: &Stats) -> Self {
        let counters = &stats.counters;
        Self {
            name: name.to_owned(),
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
                shed: 0,
                bytes: counters.bytes_read,
            },
            puts: puts(counters),
            tiers: tiers(stats),
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
            pool: PoolStatus {
                capacity_bytes: stats.pool.capacity_bytes as u64,
                reserved_bytes: stats.pool.reserved_bytes as u64,
                requested_bytes: stats.pool.requested_bytes as u64,
                free_bytes: (stats.pool.free_bytes + stats.pool.magazine_bytes) as u64,
                largest_free_bytes: stats.pool.largest_free_bytes as u64,
                huge_bytes: stats.pool.huge_bytes as u64,
            },
            notes: stats.notes.clone(),
            ..Self::default()
        }
    }

    /// Share of the blocks asked for by lookups that were there, 0 to 1; none without lookups.
    pub fn hit_rate(&self) -> Option<f64> {
        share(self.lookups.matched_blocks, self.lookups.requested_blocks)
    }
}

/// A part of a whole, 0 to 1; none of nothing.
#[expect(clippy::cast_precision_loss, reason = "a share for people")]
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

fn puts(counters: &Counters) -> PutStatus {
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

fn mover(stats: &Stats) -> MoverStatus {
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

/// DRAM and the stages below it, and whatever else hits came from: hits by tier add up to hits.
fn tiers(stats: &Stats) -> Vec<TierStatus> {
    let mut tiers = vec![TierStatus {
        name: DRAM.to_owned(),
        capacity_bytes: stats.pool.capacity_bytes as u64,
        used_bytes: stats.dram_bytes,
        blocks: Some(stats.dram_blocks),
        ..TierStatus::default()
    }];
    tiers.extend(stats.stages.iter().map(|(name, stage)| TierStatus {
        name: (*name).to_owned(),
        capacity_bytes: stage.capacity_bytes,
        used_bytes: stage.used_bytes,
        files: Some(stage.files),
        damaged_blocks: stage.damaged_blocks,
        notes: stage.notes.clone(),
        ..TierStatus::default()
    }));
    for served in &stats.hits_by_tier {
        let known = tiers.iter().position(|tier| tier.name == served.tier);
        let at = known.unwrap_or_else(|| {
            tiers.push(TierStatus { name: served.tier.to_owned(), ..TierStatus::default() });
            tiers.len() - 1
        });
        tiers[at].hits += served.blocks;
        tiers[at].hit_bytes += served.bytes;
    }
    tiers
}
