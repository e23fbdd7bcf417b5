//! Check for pool files of this user that belong to no running process.

use cascade_block::ByteSize;
use cascade_store::LeftoverPool;

use super::{Check, CheckOutcome};
use crate::tenants::{DEFAULT_TENANT, pool_file};

pub(super) const LEFT_POOLS: Check = Check {
    id: "left_pools",
    why: "an unused pool takes memory until a node takes it over or it is removed",
    run: |config, machine| {
        let Some(directory) = &config.pool_directory else {
            return CheckOutcome::absent("keep_pool is never: the pool has no file");
        };
        let left = match machine.left_pools(directory) {
            Ok(left) => left,
            Err(error) => return CheckOutcome::absent(format!("{}: {error}", directory.display())),
        };
        let own = pool_file(config, DEFAULT_TENANT);
        let (own, others): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|pool| own.as_ref() == Some(&pool.path));
        if others.is_empty() {
            return CheckOutcome::ok(match &own[..] {
                [] => "none".to_owned(),
                own => format!("{}: the next start takes it over", list(own)),
            });
        }
        let found = format!("{} of nodes that are not running", list(&others));
        let paths: Vec<_> =
            others.iter().map(|pool| format!("{0} {0}.ledger", pool.path.display())).collect();
        CheckOutcome::warning(
            found,
            format!("start the node that created it, or remove it: rm {}", paths.join(" ")),
        )
    },
};

fn list(pools: &[LeftoverPool]) -> String {
    let describe = |pool: &LeftoverPool| {
        let blocks = if pool.has_blocks { "with blocks" } else { "of an interrupted start" };
        format!("{} ({}, {blocks})", pool.path.display(), ByteSize(pool.bytes).rounded())
    };
    pools.iter().map(describe).collect::<Vec<_>>().join(", ")
}
