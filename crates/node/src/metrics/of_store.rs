//! Metric families of the tenants' stores.

use crate::metrics::{Family, Kind};
use crate::status::{HealthState, HealthStatus, Status, TenantStatus, TierStatus};

/// These families, in the order of a scrape.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "cascade_requested_blocks",
        kind: Kind::Counter,
        help: "Blocks requested: by lookups, and by reads without one before",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.hit_rate.requested_blocks));
        },
    },
    Family {
        name: "cascade_matched_blocks",
        kind: Kind::Counter,
        help: "Requested blocks that were there, by the fastest tier that had them",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.matched_blocks));
        },
    },
    Family {
        name: "cascade_lookups",
        kind: Kind::Counter,
        help: "Lookups of chains of blocks",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.lookups.requests));
        },
    },
    Family {
        name: "cascade_lookup_requested_blocks",
        kind: Kind::Counter,
        help: "Blocks that lookups requested",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.lookups.requested_blocks));
        },
    },
    Family {
        name: "cascade_lookup_matched_blocks",
        kind: Kind::Counter,
        help: "Leading blocks that lookups found",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.lookups.matched_blocks));
        },
    },
    Family {
        name: "cascade_gets",
        kind: Kind::Counter,
        help: "Blocks read by get and view: hits, misses and failures add up to it",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.gets.blocks));
        },
    },
    Family {
        name: "cascade_hits",
        kind: Kind::Counter,
        help: "Blocks served, by the tier that had them",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.hits));
        },
    },
    Family {
        name: "cascade_hit_bytes",
        kind: Kind::Counter,
        help: "Bytes of the blocks served, by the tier that had them",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.hit_bytes));
        },
    },
    Family {
        name: "cascade_misses",
        kind: Kind::Counter,
        help: "Blocks read that were not there",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.gets.misses));
        },
    },
    Family {
        name: "cascade_shed_gets",
        kind: Kind::Counter,
        help: "Misses of blocks in a tier whose breaker was open",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.gets.shed));
        },
    },
    Family {
        name: "cascade_get_failures",
        kind: Kind::Counter,
        help: "Blocks whose read failed: deadline, no room, or a tier that failed",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.gets.failures));
        },
    },
    Family {
        name: "cascade_get_bytes",
        kind: Kind::Counter,
        help: "Bytes handed out by get and view",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.gets.bytes));
        },
    },
    Family {
        name: "cascade_puts",
        kind: Kind::Counter,
        help: "Blocks given to put, by what became of them",
        labels: &["tenant", "outcome"],
        read: |status, samples| {
            each_tenant(status, |t| {
                let puts = &t.puts;
                for (outcome, blocks) in [
                    ("stored", puts.stored),
                    ("deduplicated", puts.deduplicated),
                    ("present", puts.present),
                    ("conflict", puts.conflicts),
                    ("declined", puts.declined),
                    ("failed", puts.failures),
                ] {
                    samples.add(&[&t.name, outcome], blocks);
                }
            });
        },
    },
    Family {
        name: "cascade_put_bytes",
        kind: Kind::Counter,
        help: "Bytes written into the first tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.puts.bytes));
        },
    },
    Family {
        name: "cascade_tier_capacity_bytes",
        kind: Kind::Gauge,
        help: "Bytes that the tier may use",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.capacity_bytes));
        },
    },
    Family {
        name: "cascade_tier_used_bytes",
        kind: Kind::Gauge,
        help: "Bytes that the tier uses",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.used_bytes));
        },
    },
    Family {
        name: "cascade_tier_blocks",
        kind: Kind::Gauge,
        help: "Blocks in the tier, where that is counted",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| {
                if let Some(blocks) = tier.blocks {
                    samples.add(&[&t.name, &tier.name], blocks);
                }
            });
        },
    },
    Family {
        name: "cascade_tier_files",
        kind: Kind::Gauge,
        help: "Files that the tier has, where it has any",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| {
                if let Some(files) = tier.files {
                    samples.add(&[&t.name, &tier.name], files);
                }
            });
        },
    },
    Family {
        name: "cascade_tier_damaged_blocks",
        kind: Kind::Counter,
        help: "Blocks that the tier found damaged",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.damaged_blocks));
        },
    },
    Family {
        name: "cascade_tier_damaged_structures",
        kind: Kind::Counter,
        help: "Headers, footers and other structures of files that the tier found damaged",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| {
                samples.add(&[&t.name, &tier.name], tier.damaged_structures);
            });
        },
    },
    Family {
        name: "cascade_tier_health",
        kind: Kind::Gauge,
        help: "1 for the state that the tier is in, 0 for the others",
        labels: &["tenant", "tier", "state"],
        read: |status, samples| {
            each_health(status, |t, tier, health| {
                for state in HealthState::ALL {
                    samples.add(
                        &[&t.name, &tier.name, state.name()],
                        u64::from(state == health.state),
                    );
                }
            });
        },
    },
    Family {
        name: "cascade_tier_circuit_open",
        kind: Kind::Gauge,
        help: "1 while the tier is not used in this direction because it failed, else 0",
        labels: &["tenant", "tier", "direction"],
        read: |status, samples| {
            each_health(status, |t, tier, health| {
                for (direction, state) in [("read", health.reads), ("write", health.writes)] {
                    let is_open = u64::from(state != HealthState::Healthy);
                    samples.add(&[&t.name, &tier.name, direction], is_open);
                }
            });
        },
    },
    Family {
        name: "cascade_tier_breaker_openings",
        kind: Kind::Counter,
        help: "Times that the tier's breaker opened",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_health(status, |t, tier, health| {
                samples.add(&[&t.name, &tier.name], health.opened);
            });
        },
    },
    Family {
        name: "cascade_tier_stuck_calls",
        kind: Kind::Gauge,
        help: "Calls to the tier that are far past their deadline",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_health(status, |t, tier, health| {
                samples.add(&[&t.name, &tier.name], health.stuck_calls);
            });
        },
    },
    Family {
        name: "cascade_damaged_blocks",
        kind: Kind::Counter,
        help: "Blocks found damaged and answered as misses",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.damaged_blocks));
        },
    },
    Family {
        name: "cascade_demoted_blocks",
        kind: Kind::Counter,
        help: "Blocks written to a lower tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.demoted_blocks));
        },
    },
    Family {
        name: "cascade_demoted_bytes",
        kind: Kind::Counter,
        help: "Bytes written to a lower tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.demoted_bytes));
        },
    },
    Family {
        name: "cascade_promoted_blocks",
        kind: Kind::Counter,
        help: "Blocks brought up from a lower tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.promoted_blocks));
        },
    },
    Family {
        name: "cascade_promoted_bytes",
        kind: Kind::Counter,
        help: "Bytes brought up from a lower tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.promoted_bytes));
        },
    },
    Family {
        name: "cascade_pending_bytes",
        kind: Kind::Gauge,
        help: "Bytes that wait to be written to lower tiers",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.pending_bytes));
        },
    },
    Family {
        name: "cascade_demote_failures",
        kind: Kind::Counter,
        help: "Blocks that a lower tier failed to take",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.demote_failures));
        },
    },
    Family {
        name: "cascade_demote_declines",
        kind: Kind::Counter,
        help: "Blocks that a lower tier never takes",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.demote_declines));
        },
    },
    Family {
        name: "cascade_name_failures",
        kind: Kind::Counter,
        help: "Names that a lower tier could not be told to learn or to forget",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.name_failures));
        },
    },
    Family {
        name: "cascade_prefetched_blocks",
        kind: Kind::Counter,
        help: "Blocks asked for by prefetch",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.prefetched_blocks));
        },
    },
    Family {
        name: "cascade_prefetched_used_blocks",
        kind: Kind::Counter,
        help: "Prefetched blocks that were read before they were evicted again",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.prefetched_used_blocks));
        },
    },
    Family {
        name: "cascade_evicted_blocks",
        kind: Kind::Counter,
        help: "Blocks that left DRAM to make room",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.evictions.blocks));
        },
    },
    Family {
        name: "cascade_evicted_bytes",
        kind: Kind::Counter,
        help: "Bytes that left DRAM to make room",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.evictions.bytes));
        },
    },
    Family {
        name: "cascade_lost_blocks",
        kind: Kind::Counter,
        help: "Evicted blocks that no other tier had",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.evictions.lost_blocks));
        },
    },
    Family {
        name: "cascade_reclaimed_blocks",
        kind: Kind::Counter,
        help: "Blocks that a lower tier dropped to make room",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.evictions.reclaimed_blocks));
        },
    },
    Family {
        name: "cascade_keys",
        kind: Kind::Gauge,
        help: "Keys known in any tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.keys));
        },
    },
    Family {
        name: "cascade_contents",
        kind: Kind::Gauge,
        help: "Distinct contents known in any tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.contents));
        },
    },
    Family {
        name: "cascade_content_bytes",
        kind: Kind::Gauge,
        help: "Bytes of the distinct contents, each counted once",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.content_bytes));
        },
    },
    Family {
        name: "cascade_catalog_memory_bytes",
        kind: Kind::Gauge,
        help: "Memory of the catalog and the policy",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.memory_bytes));
        },
    },
    Family {
        name: "cascade_protected_blocks",
        kind: Kind::Gauge,
        help: "Protected blocks in DRAM",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.protected_blocks));
        },
    },
    Family {
        name: "cascade_protection_refused",
        kind: Kind::Counter,
        help: "Blocks that were to be protected, but the quota was full",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.protection_refused));
        },
    },
    Family {
        name: "cascade_pool_capacity_bytes",
        kind: Kind::Gauge,
        help: "Size of the shared-memory pool",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.capacity_bytes));
        },
    },
    Family {
        name: "cascade_pool_reserved_bytes",
        kind: Kind::Gauge,
        help: "Bytes of the pool that slabs hold, rounding included",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.reserved_bytes));
        },
    },
    Family {
        name: "cascade_pool_requested_bytes",
        kind: Kind::Gauge,
        help: "Bytes of the pool that slabs asked for",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.requested_bytes));
        },
    },
    Family {
        name: "cascade_pool_free_bytes",
        kind: Kind::Gauge,
        help: "Free bytes of the pool",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.free_bytes));
        },
    },
    Family {
        name: "cascade_pool_largest_free_bytes",
        kind: Kind::Gauge,
        help: "The largest piece of the pool that is free in a row",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.largest_free_bytes));
        },
    },
    Family {
        name: "cascade_pool_huge_page_bytes",
        kind: Kind::Gauge,
        help: "Bytes of the pool on huge pages",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.huge_bytes));
        },
    },
    Family {
        name: "cascade_shadow_hit_ratio",
        kind: Kind::Gauge,
        help: "Share of the blocks of lookups that would match at this capacity, 0 to 1",
        labels: &["tenant", "tier", "capacity_percent"],
        read: |status, samples| {
            each_tenant(status, |t| {
                for shadow in &t.shadows {
                    let percent = shadow.capacity_percent.to_string();
                    let labels = [t.name.as_str(), &shadow.tier, &percent];
                    samples.add_real(&labels, shadow.predicted_hit_rate);
                }
            });
        },
    },
    Family {
        name: "cascade_warm_restart_blocks",
        kind: Kind::Gauge,
        help: "Blocks that came back from before the last restart",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| {
                if let Some(warm) = &t.warm_restart {
                    samples.add(&[&t.name], warm.recovered_blocks);
                }
            });
        },
    },
    Family {
        name: "cascade_warm_restart_bytes",
        kind: Kind::Gauge,
        help: "Bytes that came back from before the last restart",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| {
                if let Some(warm) = &t.warm_restart {
                    samples.add(&[&t.name], warm.recovered_bytes);
                }
            });
        },
    },
    Family {
        name: "cascade_warm_restart_rejected_records",
        kind: Kind::Gauge,
        help: "Records from before the last restart that were not trusted",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| {
                if let Some(warm) = &t.warm_restart {
                    samples.add(&[&t.name], warm.rejected_records);
                }
            });
        },
    },
    Family {
        name: "cascade_warm_restart_seconds",
        kind: Kind::Gauge,
        help: "How long it took to take the old pool over",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| {
                if let Some(warm) = &t.warm_restart {
                    samples.add_real(&[&t.name], warm.recover_s);
                }
            });
        },
    },
];

fn each_tenant(status: &Status, mut visit: impl FnMut(&TenantStatus)) {
    status.tenants.iter().for_each(&mut visit);
}

fn each_tier(status: &Status, mut visit: impl FnMut(&TenantStatus, &TierStatus)) {
    each_tenant(status, |tenant| tenant.tiers.iter().for_each(|tier| visit(tenant, tier)));
}

fn each_health(status: &Status, mut visit: impl FnMut(&TenantStatus, &TierStatus, &HealthStatus)) {
    each_tier(status, |tenant, tier| {
        if let Some(health) = &tier.health {
            visit(tenant, tier, health);
        }
    });
}
