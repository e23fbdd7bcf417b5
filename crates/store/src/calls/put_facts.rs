//! What the catalog and the stages learn of a put block.

use cascade_block::Digest;
use cascade_runtime::Clock;
use cascade_tier::Put;
use cascade_tier::tier::BlockFacts;

use crate::core::catalog::NewKey;

pub(super) fn facts(clock: &dyn Clock, put: &Put<'_>, digest: Option<Digest>) -> BlockFacts {
    let expires = put.ttl_ms.map(|ttl| clock.unix_ms().saturating_add(ttl));
    BlockFacts {
        key: put.key,
        digest,
        parent: put.parent,
        namespace: put.namespace,
        bytes: u32::try_from(put.bytes.len()).expect("longer blocks were refused"),
        is_prefix: put.is_prefix,
        written_unix_ms: 0,
        expires_unix_ms: expires,
    }
}

pub(super) fn new_key(facts: &BlockFacts) -> NewKey {
    NewKey {
        key: facts.key,
        parent: facts.parent,
        is_prefix: facts.is_prefix,
        expires_unix_ms: facts.expires_unix_ms.unwrap_or(0),
    }
}
