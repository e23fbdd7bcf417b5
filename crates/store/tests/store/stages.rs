//! Every stage passes the conformance checks, including one of a third party.

use std::sync::Arc;

use cascade_store::stages::FakeTier;
use cascade_tier::conformance::tier as conformance;

use crate::third_party::MapStage;

#[test]
fn the_fake_stage_conforms() {
    conformance::all(&conformance::pool(), &mut || Arc::new(FakeTier::default()));
}

#[test]
fn a_third_party_stage_conforms() {
    conformance::all(&conformance::pool(), &mut || MapStage::new());
}
