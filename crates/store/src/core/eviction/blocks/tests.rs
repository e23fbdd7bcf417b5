//! The cost of corrections of parents and of deletions, in blocks visited.

use super::*;

const BLOCKS: usize = 4096;

fn put(blocks: &mut BlockTable, number: usize, parent: Option<Slot>) -> Slot {
    let owner = u32::try_from(number).expect("a small number");
    let fingerprint = number as u64;
    blocks.insert(&Incoming { owner, fingerprint, parent, bytes: 1, is_protected: false }, false)
}

/// Corrects the parents of a chain, as a request does. Returns whether it contradicts the others.
fn request(blocks: &mut BlockTable, chain: &[Slot]) -> bool {
    let requested = |slot: &Slot| RequestedBlock {
        fingerprint: blocks.fingerprint(*slot),
        resident: Some(*slot),
    };
    let chain: Vec<_> = chain.iter().map(requested).collect();
    let (mut walk, mut visits) = (ChainWalk::default(), Visits::unlimited());
    let mut parted = false;
    for at in 1..chain.len() {
        let child = chain[at].resident.expect("it is resident");
        parted = blocks.adopt(child, &chain[..at], &mut walk, &mut visits).is_contradiction;
        if parted {
            break;
        }
    }
    assert!(blocks.end_walk(&chain, &mut walk, &mut visits) && !blocks.has_marks);
    assert!(blocks.table.iter().all(|block| !block.is_visited), "no mark stays");
    parted
}

/// Each adoption walked to the root of its chain: for 32,768 blocks 268 million steps under the
/// lock.
#[test]
fn a_lookup_of_pairs_and_then_of_their_chain_visits_each_block_once() {
    let mut blocks = BlockTable::default();
    let chain: Vec<_> = (0..BLOCKS).map(|number| put(&mut blocks, number, None)).collect();
    for pair in chain.chunks(2) {
        assert!(!request(&mut blocks, pair));
    }
    assert!(!request(&mut blocks, &chain));
    assert!(blocks.visits <= 2 * BLOCKS, "{} visits", blocks.visits);
    let parents = chain.windows(2).all(|pair| blocks.parent(pair[1]) == Some(pair[0]));
    assert!(parents, "the whole chain is linked");
    assert!(request(&mut blocks, &[chain[2], chain[1]]), "a cycle is refused");
    assert!(request(&mut blocks, &[chain[5], chain[5]]), "a block is not its own parent");
}

#[test]
fn a_first_block_with_too_many_ancestors_becomes_a_root() {
    let mut blocks = BlockTable::default();
    let mut parent = None;
    let mut chain = Vec::new();
    for number in 0..BLOCKS {
        parent = Some(put(&mut blocks, number, parent));
        chain.extend(parent);
    }
    let (other, child) = (put(&mut blocks, BLOCKS, None), put(&mut blocks, BLOCKS + 1, None));
    let before = [other].map(|slot| requested(&blocks, slot));
    blocks.adopt(child, &before, &mut ChainWalk::default(), &mut Visits::unlimited());
    let last = chain[BLOCKS - 1];
    blocks.visits = 0;
    // The chain names `other`, which has a child, as the next block.
    assert!(!request(&mut blocks, &[last, other, child]));
    assert!(blocks.visits <= 2 * ANCESTORS_ABOVE_MAX, "{} visits", blocks.visits);
    assert_eq!(blocks.parent(last), None);
    assert!(blocks.is_leaf(chain[BLOCKS - 2]), "its former parent is a leaf");
    assert_eq!(blocks.parent(other), Some(last));
}

fn requested(blocks: &BlockTable, slot: Slot) -> RequestedBlock {
    RequestedBlock { fingerprint: blocks.fingerprint(slot), resident: Some(slot) }
}

/// Deleting the last block of a chain whose other blocks were deleted before freed all of their
/// slots in one call.
#[test]
fn a_chain_that_is_deleted_from_its_root_on_is_freed_in_parts() {
    let mut blocks = BlockTable::default();
    let root = put(&mut blocks, 0, None);
    let mut chain = vec![root];
    for number in 1..BLOCKS {
        let parent = chain.last().copied();
        chain.push(put(&mut blocks, number, parent));
    }
    for slot in &chain[1..BLOCKS - 1] {
        assert_eq!(blocks.remove(*slot), None);
    }
    assert_eq!(blocks.remove(chain[BLOCKS - 1]), None, "the root counts a child until the end");
    let mut operations = 1;
    let leaf = loop {
        let before = blocks.free.len();
        let leaf = blocks.free_unfinished();
        assert!(blocks.free.len() - before <= FREED_MAX, "an operation frees few slots");
        operations += 1;
        if leaf.is_some() {
            break leaf;
        }
        assert!(!blocks.is_leaf(root), "the root is evicted after its descendants");
        assert!(operations < BLOCKS, "the rest is freed by later operations");
    };
    assert_eq!(leaf, Some(root));
    assert_eq!(blocks.free.len(), BLOCKS - 1, "every slot is free again");
    assert_eq!(blocks.free_unfinished(), None);
}
