//! Metric families of the tenants' stores.

use crate::metrics::{MetricFamily, MetricKind};
use crate::status::{HealthState, HealthStatus, Status, TenantStatus, TierStatus};

/// The families, in the order of a scrape.
pub(super) const FAMILIES: &[MetricFamily] = &[
    MetricFamily {
        name: "cascade_requested_blocks",
        kind: MetricKind::Counter,
        help: "Blocks requested: by lookups, and by reads without a lookup",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.hit_rate.requested_blocks));
        },
    },
    MetricFamily {
        name: "cascade_matched_blocks",
        kind: MetricKind::Counter,
        help: "Requested blocks that matched, by the fastest tier that had them",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.matched_blocks));
        },
    },
    MetricFamily {
        name: "cascade_lookups",
        kind: MetricKind::Counter,
        help: "Lookups",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.lookups.requests));
        },
    },
    MetricFamily {
        name: "cascade_lookup_requested_blocks",
        kind: MetricKind::Counter,
        help: "Blocks requested by lookups",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.lookups.requested_blocks));
        },
    },
    MetricFamily {
        name: "cascade_lookup_matched_blocks",
        kind: MetricKind::Counter,
        help: "Leading blocks matched by lookups",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.lookups.matched_blocks));
        },
    },
    MetricFamily {
        name: "cascade_gets",
        kind: MetricKind::Counter,
        help: "Blocks read by get and view; the sum of hits, misses and failures",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.gets.blocks));
        },
    },
    MetricFamily {
        name: "cascade_hits",
        kind: MetricKind::Counter,
        help: "Blocks read, by the tier that served them",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.hits));
        },
    },
    MetricFamily {
        name: "cascade_hit_bytes",
        kind: MetricKind::Counter,
        help: "Bytes of the blocks read, by the tier that served them",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.hit_bytes));
        },
    },
    MetricFamily {
        name: "cascade_misses",
        kind: MetricKind::Counter,
        help: "Blocks that reads did not find",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.gets.misses));
        },
    },
    MetricFamily {
        name: "cascade_shed_gets",
        kind: MetricKind::Counter,
        help: "Misses of blocks in a tier whose circuit was open",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.gets.shed));
        },
    },
    MetricFamily {
        name: "cascade_get_failures",
        kind: MetricKind::Counter,
        help: "Blocks whose read failed: deadline, no free memory, or a failed tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.gets.failures));
        },
    },
    MetricFamily {
        name: "cascade_get_bytes",
        kind: MetricKind::Counter,
        help: "Bytes returned by get and view",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.gets.bytes));
        },
    },
    MetricFamily {
        name: "cascade_puts",
        kind: MetricKind::Counter,
        help: "Blocks put, by outcome",
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
    MetricFamily {
        name: "cascade_put_bytes",
        kind: MetricKind::Counter,
        help: "Bytes written to the first tier by puts",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.puts.bytes));
        },
    },
    MetricFamily {
        name: "cascade_tier_capacity_bytes",
        kind: MetricKind::Gauge,
        help: "Capacity of the tier",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.capacity_bytes));
        },
    },
    MetricFamily {
        name: "cascade_tier_used_bytes",
        kind: MetricKind::Gauge,
        help: "Bytes used in the tier",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.used_bytes));
        },
    },
    MetricFamily {
        name: "cascade_tier_blocks",
        kind: MetricKind::Gauge,
        help: "Blocks in the tier, if it counts them",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| {
                if let Some(blocks) = tier.blocks {
                    samples.add(&[&t.name, &tier.name], blocks);
                }
            });
        },
    },
    MetricFamily {
        name: "cascade_tier_files",
        kind: MetricKind::Gauge,
        help: "Files of the tier, if it has any",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| {
                if let Some(files) = tier.files {
                    samples.add(&[&t.name, &tier.name], files);
                }
            });
        },
    },
    MetricFamily {
        name: "cascade_tier_damaged_blocks",
        kind: MetricKind::Counter,
        help: "Blocks in the tier that failed their checksum",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| samples.add(&[&t.name, &tier.name], tier.damaged_blocks));
        },
    },
    MetricFamily {
        name: "cascade_tier_damaged_structures",
        kind: MetricKind::Counter,
        help: "Headers, footers and other file structures of the tier that were damaged",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_tier(status, |t, tier| {
                samples.add(&[&t.name, &tier.name], tier.damaged_structures);
            });
        },
    },
    MetricFamily {
        name: "cascade_tier_health",
        kind: MetricKind::Gauge,
        help: "1 for the current state of the tier, 0 for the others",
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
    MetricFamily {
        name: "cascade_tier_circuit_open",
        kind: MetricKind::Gauge,
        help: "1 while the circuit of the tier is open for reads or writes, else 0",
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
    MetricFamily {
        name: "cascade_tier_breaker_openings",
        kind: MetricKind::Counter,
        help: "Times that the tier's circuit opened",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_health(status, |t, tier, health| {
                samples.add(&[&t.name, &tier.name], health.opened);
            });
        },
    },
    MetricFamily {
        name: "cascade_tier_stuck_calls",
        kind: MetricKind::Gauge,
        help: "Calls to the tier that are long past their deadline",
        labels: &["tenant", "tier"],
        read: |status, samples| {
            each_health(status, |t, tier, health| {
                samples.add(&[&t.name, &tier.name], health.stuck_calls);
            });
        },
    },
    MetricFamily {
        name: "cascade_damaged_blocks",
        kind: MetricKind::Counter,
        help: "Blocks that failed their checksum and were answered as misses",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.damaged_blocks));
        },
    },
    MetricFamily {
        name: "cascade_demoted_blocks",
        kind: MetricKind::Counter,
        help: "Blocks written to a lower tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.demoted_blocks));
        },
    },
    MetricFamily {
        name: "cascade_demoted_bytes",
        kind: MetricKind::Counter,
        help: "Bytes written to a lower tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.demoted_bytes));
        },
    },
    MetricFamily {
        name: "cascade_promoted_blocks",
        kind: MetricKind::Counter,
        help: "Blocks copied up from a lower tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.promoted_blocks));
        },
    },
    MetricFamily {
        name: "cascade_promoted_bytes",
        kind: MetricKind::Counter,
        help: "Bytes copied up from a lower tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.promoted_bytes));
        },
    },
    MetricFamily {
        name: "cascade_pending_bytes",
        kind: MetricKind::Gauge,
        help: "Bytes waiting to be written to lower tiers",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.pending_bytes));
        },
    },
    MetricFamily {
        name: "cascade_demote_failures",
        kind: MetricKind::Counter,
        help: "Blocks that could not be written to a lower tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.demote_failures));
        },
    },
    MetricFamily {
        name: "cascade_demote_declines",
        kind: MetricKind::Counter,
        help: "Blocks that a lower tier does not accept",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.demote_declines));
        },
    },
    MetricFamily {
        name: "cascade_name_failures",
        kind: MetricKind::Counter,
        help: "Keys that could not be added to or removed from a lower tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.name_failures));
        },
    },
    MetricFamily {
        name: "cascade_prefetched_blocks",
        kind: MetricKind::Counter,
        help: "Blocks requested by prefetch",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.prefetched_blocks));
        },
    },
    MetricFamily {
        name: "cascade_prefetched_used_blocks",
        kind: MetricKind::Counter,
        help: "Prefetched blocks that were read before they were evicted",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.mover.prefetched_used_blocks));
        },
    },
    MetricFamily {
        name: "cascade_evicted_blocks",
        kind: MetricKind::Counter,
        help: "Blocks evicted from DRAM",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.evictions.blocks));
        },
    },
    MetricFamily {
        name: "cascade_evicted_bytes",
        kind: MetricKind::Counter,
        help: "Bytes evicted from DRAM",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.evictions.bytes));
        },
    },
    MetricFamily {
        name: "cascade_lost_blocks",
        kind: MetricKind::Counter,
        help: "Evicted blocks that were in no other tier and did not come from a source",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.evictions.lost_blocks));
        },
    },
    MetricFamily {
        name: "cascade_reclaimed_blocks",
        kind: MetricKind::Counter,
        help: "Blocks dropped by a lower tier to free space",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.evictions.reclaimed_blocks));
        },
    },
    MetricFamily {
        name: "cascade_keys",
        kind: MetricKind::Gauge,
        help: "Keys in the catalog, in any tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.keys));
        },
    },
    MetricFamily {
        name: "cascade_contents",
        kind: MetricKind::Gauge,
        help: "Distinct contents in the catalog, in any tier",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.contents));
        },
    },
    MetricFamily {
        name: "cascade_content_bytes",
        kind: MetricKind::Gauge,
        help: "Bytes of distinct contents, each counted once",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.content_bytes));
        },
    },
    MetricFamily {
        name: "cascade_catalog_memory_bytes",
        kind: MetricKind::Gauge,
        help: "Memory of the catalog and the eviction policy",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.memory_bytes));
        },
    },
    MetricFamily {
        name: "cascade_protected_blocks",
        kind: MetricKind::Gauge,
        help: "Protected blocks in DRAM",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.protected_blocks));
        },
    },
    MetricFamily {
        name: "cascade_protection_refused",
        kind: MetricKind::Counter,
        help: "Blocks not protected because the protected share was full",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.catalog.protection_refused));
        },
    },
    MetricFamily {
        name: "cascade_store_lock_hold_seconds",
        kind: MetricKind::Histogram,
        help: "Time that the store's lock was held for 128 keys or more",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add_histogram(&[&t.name], &t.lock_hold_s));
        },
    },
    MetricFamily {
        name: "cascade_pool_capacity_bytes",
        kind: MetricKind::Gauge,
        help: "Size of the shared-memory pool",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.capacity_bytes));
        },
    },
    MetricFamily {
        name: "cascade_pool_reserved_bytes",
        kind: MetricKind::Gauge,
        help: "Bytes of the pool in slabs, including rounding",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.reserved_bytes));
        },
    },
    MetricFamily {
        name: "cascade_pool_requested_bytes",
        kind: MetricKind::Gauge,
        help: "Bytes of the pool in slabs, without rounding",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.requested_bytes));
        },
    },
    MetricFamily {
        name: "cascade_pool_free_bytes",
        kind: MetricKind::Gauge,
        help: "Free bytes of the pool",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.free_bytes));
        },
    },
    MetricFamily {
        name: "cascade_pool_largest_free_bytes",
        kind: MetricKind::Gauge,
        help: "Largest contiguous free range of the pool",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.largest_free_bytes));
        },
    },
    MetricFamily {
        name: "cascade_pool_huge_page_bytes",
        kind: MetricKind::Gauge,
        help: "Bytes of the pool on huge pages",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| samples.add(&[&t.name], t.pool.huge_bytes));
        },
    },
    MetricFamily {
        name: "cascade_shadow_hit_ratio",
        kind: MetricKind::Gauge,
        help: "Predicted share of lookup blocks that would match at this capacity, 0 to 1",
        labels: &["tenant", "tier", "capacity_percent"],
        read: |status, samples| {
            each_tenant(status, |t| {
                for shadow in &t.shadows {
                    let percent = shadow.capacity_percent.to_string();
                    let labels = [t.name.as_str(), &shadow.tier, &percent];
                    samples.add_float(&labels, shadow.predicted_hit_rate);
                }
            });
        },
    },
    MetricFamily {
        name: "cascade_warm_restart_blocks",
        kind: MetricKind::Gauge,
        help: "Blocks recovered by the last restart",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| {
                if let Some(warm) = &t.warm_restart {
                    samples.add(&[&t.name], warm.recovered_blocks);
                }
            });
        },
    },
    MetricFamily {
        name: "cascade_warm_restart_bytes",
        kind: MetricKind::Gauge,
        help: "Bytes recovered by the last restart",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| {
                if let Some(warm) = &t.warm_restart {
                    samples.add(&[&t.name], warm.recovered_bytes);
                }
            });
        },
    },
    MetricFamily {
        name: "cascade_warm_restart_rejected_records",
        kind: MetricKind::Gauge,
        help: "Records rejected by the last restart",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| {
                if let Some(warm) = &t.warm_restart {
                    samples.add(&[&t.name], warm.rejected_records);
                }
            });
        },
    },
    MetricFamily {
        name: "cascade_warm_restart_seconds",
        kind: MetricKind::Gauge,
        help: "Duration of the recovery at the last restart",
        labels: &["tenant"],
        read: |status, samples| {
            each_tenant(status, |t| {
                if let Some(warm) = &t.warm_restart {
                    samples.add_float(&[&t.name], warm.recover_s);
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
