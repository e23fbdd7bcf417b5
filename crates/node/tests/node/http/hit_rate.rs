//! The hit rate has one value in JSON, on the status page, in metrics, panels and alerts.

use cascade_block::BlockKey;
use cascade_node::config::SecurityConfig;
use cascade_store::{CallOptions, Put, Request};

use super::served::Served;

/// Blocks of a request. One of them is shared by all requests.
const CHAIN: u64 = 20;

fn chain(request: u64) -> Vec<BlockKey> {
    let key = |number: u64| {
        let mut bytes = [7; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        BlockKey::from_bytes(bytes)
    };
    let own = (1..CHAIN).map(|at| key((request + 1) * CHAIN + at));
    [key(0)].into_iter().chain(own).collect()
}

fn put(served: &Served, keys: &[BlockKey]) {
    let puts: Vec<Put<'_>> = keys.iter().map(|key| Put::new(*key, &[9; 512])).collect();
    served.node.store().put(&puts, CallOptions::default());
}

/// Makes requests like an engine: look up, load what matched, put the rest. 5 % is shared.
pub(crate) fn serve(served: &Served, requests: std::ops::Range<u64>) {
    for request in requests {
        let keys = chain(request);
        if request == 0 {
            put(served, &keys[..1]);
        }
        let matched = served.node.store().lookup_prefix(&Request::new(&keys)).tiers.len();
        assert_eq!(matched, 1);
        drop(served.node.store().view(&keys[..matched], CallOptions::default()));
        put(served, &keys[matched..]);
    }
}

/// The page and the alerts showed 100 % for 200 such requests, `top` showed 5 %.
#[test]
fn a_hit_rate_of_five_percent_is_shown_everywhere() {
    let served = Served::start_of(16 << 20, SecurityConfig::default(), |_| {});
    // A first sample of the history.
    served.get("/status.json");
    cascade_runtime::sleep(std::time::Duration::from_secs(1));
    serve(&served, 0..200);
    let status = served.status();
    let rate = status.tenants[0].hit_rate;
    assert_eq!((rate.requested_blocks, rate.matched_blocks), (4000, 200));
    assert_eq!(rate.ratio.map(f64::to_bits), Some(0.05f64.to_bits()));
    let page = served.get("/").body;
    assert!(page.contains("<b>5.0 %</b><span>hit rate, last"), "the tile: {page}");
    assert!(page.contains(">5.0 %</b> hit rate"), "the table: {page}");
    assert_eq!(page.matches("100.0 %").count(), 0, "{page}");
    let scrape = served.get("/metrics");
    let sum = |name| scrape.metric(name, "tenant=\"default\"") as u64;
    assert_eq!(sum("cascade_requested_blocks_total"), 4000);
    assert_eq!(sum("cascade_matched_blocks_total"), 200);
    assert_eq!(sum("cascade_hits_total"), 200, "loading matched blocks is not a request");
}
