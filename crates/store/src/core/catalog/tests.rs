//! Tests of the catalog against a naive map, with colliding fingerprints.

use std::collections::HashMap;

use cascade_block::{BlockKey, DigestAlgorithm};
use cascade_tier::tier::Address;
use proptest::prelude::*;

use super::*;

fn key(fingerprint: u64, rest: u8) -> BlockKey {
    let mut bytes = [rest; 32];
    bytes[..8].copy_from_slice(&fingerprint.to_le_bytes());
    BlockKey::from_bytes(bytes)
}

fn new_key(key: BlockKey) -> NewKey {
    NewKey { key, parent: None, is_prefix: false, expires_unix_ms: 0 }
}

proptest! {
    #[test]
    fn a_table_finds_each_index_among_equal_tags(
        operations in prop::collection::vec((0u64..12, 0u32..3, any::<bool>()), 1..400),
    ) {
        let mut table = KeyTable::new();
        let mut model = std::collections::HashSet::new();
        for (fingerprint, rest, is_insert) in operations {
            // Few fingerprints in one shard: long probe runs, equal tags, wrap-around.
            let print = fingerprint * 3 + (u64::MAX << 40);
            let index = u32::try_from(fingerprint).unwrap() * 8 + rest;
            let is_there = model.contains(&(print, index));
            prop_assert_eq!(table.find(print, |at| at == index), is_there.then_some(index));
            if is_insert && !is_there {
                table.insert(print, index);
                model.insert((print, index));
            } else if !is_insert {
                prop_assert_eq!(table.remove_if_present(print, index), is_there);
                model.remove(&(print, index));
            }
        }
        for (print, index) in &model {
            prop_assert_eq!(table.find(*print, |at| at == *index), Some(*index));
        }
    }

    #[test]
    fn a_catalog_finds_the_same_keys_as_a_map(
        operations in prop::collection::vec((0u64..12, 0u8..3, any::<bool>()), 1..400),
    ) {
        let mut catalog = Catalog::new(FingerprintSeed::new(1));
        let mut model = HashMap::new();
        for (fingerprint, rest, is_insert) in operations {
            let key = key(fingerprint * 3 + (u64::MAX << 40), rest);
            match (is_insert, model.get(&key).copied()) {
                (true, None) => {
                    let (index, _) = catalog.insert(&new_key(key), 7, None);
                    model.insert(key, index);
                }
                (false, Some(index)) => {
                    prop_assert!(catalog.remove(index).is_some());
                    model.remove(&key);
                }
                _ => {}
            }
            prop_assert_eq!(catalog.key_count(), model.len());
            for (fingerprint, rest) in (0..12).flat_map(|f| (0..3).map(move |r| (f, r))) {
                let probe = super::tests::key(fingerprint * 3 + (u64::MAX << 40), rest);
                prop_assert_eq!(catalog.find(&probe), model.get(&probe).copied());
            }
        }
    }
}

proptest! {
    #[test]
    fn a_content_has_the_same_addresses_as_a_map(
        operations in prop::collection::vec(
            (0usize..4, 0..LOWER_STAGES_MAX, prop::option::of(any::<u64>())),
            1..200,
        ),
    ) {
        let mut catalog = Catalog::new(FingerprintSeed::new(1));
        let mut model: Vec<HashMap<usize, u64>> = vec![HashMap::new(); 4];
        let mut contents: Vec<_> =
            (0..4).map(|n| catalog.insert(&new_key(key(n, 0)), 1, None)).collect();
        for (at, stage, address) in operations {
            let (key_index, content) = contents[at];
            if stage == 0 && address.is_none() {
                // Its addresses go with it.
                prop_assert!(catalog.remove(key_index).is_some());
                model[at].clear();
                contents[at] = catalog.insert(&new_key(key(at as u64, 0)), 1, None);
                continue;
            }
            catalog.set_address(content, stage, address.map(Address));
            match address {
                Some(address) => model[at].insert(stage, address),
                None => model[at].remove(&stage),
            };
            for ((_, content), model) in contents.iter().zip(&model) {
                let entry = catalog.content(*content);
                for stage in 0..LOWER_STAGES_MAX {
                    let expected = model.get(&stage).copied().map(Address);
                    prop_assert_eq!(catalog.address(*content, stage), expected);
                    prop_assert_eq!(entry.has_address(stage), expected.is_some());
                }
                let slower = model.keys().copied().filter(|stage| *stage > 1).min();
                prop_assert_eq!(entry.fastest_stage_except(0b11), slower);
                let found = catalog.fastest_lower_except(*content, 0b11);
                prop_assert_eq!(found, slower.map(|stage| (stage, Address(model[&stage]))));
                prop_assert_eq!(entry.is_in_any_tier(), !model.is_empty());
            }
            for stage in 0..LOWER_STAGES_MAX {
                let count = model.iter().filter(|model| model.contains_key(&stage)).count();
                prop_assert_eq!(catalog.stage_blocks(stage), count as u64);
            }
            let outside = model.iter().filter(|model| model.len() > 2).count();
            prop_assert_eq!(catalog.many_addresses.len(), outside, "up to two are in the entry");
        }
    }
}

#[test]
fn a_batch_finds_the_same_keys_as_single_lookups() {
    let mut catalog = Catalog::new(FingerprintSeed::new(1));
    let keys: Vec<_> =
        (0..5000u64).map(|n| key(n.wrapping_mul(0x9E37_79B9_7F4A_7C15), 1)).collect();
    for key in keys.iter().step_by(2) {
        catalog.insert(&new_key(*key), 1, None);
    }
    let mut found = Vec::new();
    catalog.find_batch(&keys, &mut found);
    let singly: Vec<_> = keys.iter().map(|key| catalog.find(key)).collect();
    assert_eq!(found, singly);
    assert_eq!(found.iter().flatten().count(), 2500);
}

#[test]
fn a_content_is_removed_with_its_last_key() {
    let mut catalog = Catalog::new(FingerprintSeed::new(1));
    let digest = Digest::of(DigestAlgorithm::Blake3, b"bytes");
    let (first, content) = catalog.insert(&new_key(key(1, 0)), 5, Some(digest));
    let second = catalog.link(&new_key(key(2, 0)), content);
    let third = catalog.link(&new_key(key(3, 0)), content);
    assert_eq!(catalog.find_digest(&digest), Some(content));
    assert_eq!(catalog.keys_of(content), [third, second, first]);
    assert!(catalog.remove(second).is_none());
    assert_eq!(catalog.keys_of(content), [third, first]);
    assert!(catalog.remove(third).is_none());
    assert_eq!(catalog.find_digest(&digest), Some(content));
    assert!(catalog.remove(first).is_some());
    assert_eq!(catalog.find_digest(&digest), None);
    assert_eq!(catalog.content_count(), 0);
}

#[test]
fn a_reused_index_is_not_taken_for_the_parent() {
    let mut catalog = Catalog::new(FingerprintSeed::new(1));
    let (parent, _) = catalog.insert(&new_key(key(1 << 40, 0)), 1, None);
    let child = NewKey { parent: Some(key(1 << 40, 0)), ..new_key(key(2 << 40, 0)) };
    let (child, _) = catalog.insert(&child, 1, None);
    assert_eq!(catalog.parent_of(child), Some(parent));
    catalog.remove(parent);
    assert_eq!(catalog.parent_of(child), None);
    let (other, _) = catalog.insert(&new_key(key(3 << 40, 0)), 1, None);
    assert_eq!(other, parent, "the index is reused");
    assert_eq!(catalog.parent_of(child), None);
}

/// With 40,000 keys of equal leading bytes every search visited all of them: a put of 40,000 blocks
/// with a deadline of one second took 8.4 s.
#[test]
fn keys_with_equal_leading_bytes_do_not_slow_down_lookups() {
    for shared in [8, 16, 24] {
        let mut catalog = Catalog::new(FingerprintSeed::new(1));
        let key = |number: u32| {
            let mut bytes = [7; 32];
            bytes[shared..shared + 4].copy_from_slice(&number.to_le_bytes());
            BlockKey::from_bytes(bytes)
        };
        for number in 0..5000 {
            catalog.insert(&new_key(key(number)), 1, None);
        }
        let looked_at = std::cell::Cell::new(0_u64);
        for number in 0..5000 {
            let key = key(number);
            let found = catalog.table.find(catalog.fingerprint(&key), |index| {
                looked_at.set(looked_at.get() + 1);
                catalog.keys.get(index).key == key
            });
            assert!(found.is_some());
        }
        assert!(looked_at.get() < 5100, "{} entries for 5,000 keys", looked_at.get());
    }
}

#[test]
fn cleared_keys_are_absent_until_they_are_put_again() {
    let mut catalog = Catalog::new(FingerprintSeed::new(1));
    let keys: Vec<BlockKey> = (0..40).map(|number| key(number, 1)).collect();
    let digest = Digest::of(DigestAlgorithm::Blake3, b"bytes");
    let (_, content) = catalog.insert(&new_key(keys[0]), 7, Some(digest));
    let generation = catalog.content(content).generation;
    for key in &keys[1..] {
        catalog.insert(&new_key(*key), 7, None);
    }
    catalog.clear();
    assert_eq!((catalog.key_count(), catalog.cleared_keys()), (0, 40));
    assert!(keys.iter().all(|key| catalog.find(key).is_none()));
    assert_eq!(catalog.keys_at(0..catalog.key_indices_end()).count(), 0);
    assert_eq!(catalog.find_digest(&digest), None);
    assert!(catalog.live_content((content, generation)).is_none());

    // One is put again, before and after which others are removed.
    let old = catalog.find_cleared(&keys[3]).unwrap();
    catalog.remove(old);
    let (again, _) = catalog.insert(&new_key(keys[3]), 9, Some(digest));
    assert_eq!(catalog.find(&keys[3]), Some(again));
    assert_eq!(catalog.find_cleared(&keys[3]), None);
    let mut at = 0;
    let mut removed = 0;
    while let (Some(key), next) = catalog.next_cleared(at, 100) {
        catalog.remove(key);
        (at, removed) = (next, removed + 1);
    }
    assert_eq!((removed, catalog.cleared_keys(), catalog.key_count()), (39, 0, 1));
    assert_eq!(catalog.find(&keys[3]), Some(again));
    assert!(catalog.find_digest(&digest).is_some());
}

#[test]
fn the_search_for_cleared_keys_is_bounded_and_does_not_stop_at_gaps() {
    let mut catalog = Catalog::new(FingerprintSeed::new(1));
    let added: Vec<KeyIndex> =
        (0..100).map(|number| catalog.insert(&new_key(key(number, 1)), 7, None).0).collect();
    for index in &added[..99] {
        catalog.remove(*index);
    }
    catalog.clear();
    // Two keys pay for 32 indices.
    assert_eq!(catalog.next_cleared(0, 2), (None, 32));
    assert_eq!(catalog.next_cleared(96, 2), (Some(added[99]), 100));
    assert_eq!(catalog.next_cleared(100, 2), (None, 100));
}

/// A log of 33 MB was dropped under the store's lock, which took 10 ms.
#[test]
fn an_unread_log_and_the_expirations_of_cleared_keys_are_handed_out_to_be_dropped() {
    let mut catalog = Catalog::new(FingerprintSeed::new(1));
    *catalog.changes_mut() = Some(Box::new(ChangeLog::new(2, 1)));
    let expiring = NewKey { expires_unix_ms: 7, ..new_key(key(1, 0)) };
    catalog.insert(&expiring, 8, None);
    assert!(catalog.take_discarded().is_empty());
    catalog.clear_expirations();
    let discarded = catalog.take_discarded();
    assert!(
        matches!(&discarded[..], [Discarded::Expirations(times)] if times.len() == 1),
        "{discarded:?}"
    );
    catalog.insert(&new_key(key(2, 0)), 8, None);
    assert!(catalog.take_discarded().is_empty());
    catalog.insert(&new_key(key(3, 0)), 8, None);
    assert!(matches!(&catalog.take_discarded()[..], [Discarded::Log(_)]));
    assert!(catalog.changes_mut().is_none() && catalog.take_discarded().is_empty());
}
