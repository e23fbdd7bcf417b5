//! The undecided blocks of a call, which one message after the other carries to the node. Linear in
//! the blocks, whose number is the caller's.

use std::collections::VecDeque;

use cascade_wire::BLOCKS_MAX;

/// Takes the blocks of one message from the front.
pub(super) fn next_round(open: &mut VecDeque<usize>) -> Option<Vec<usize>> {
    let round: Vec<usize> = open.drain(..open.len().min(BLOCKS_MAX)).collect();
    (!round.is_empty()).then_some(round)
}

/// Puts those of a round that are still open back, so that they come first in the next one.
pub(super) fn defer(open: &mut VecDeque<usize>, round: &[usize], is_open: impl Fn(usize) -> bool) {
    for at in round.iter().rev().filter(|at| is_open(**at)) {
        open.push_front(*at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_blocks_come_first_in_the_next_round() {
        let mut open: VecDeque<usize> = (0..BLOCKS_MAX + 5).collect();
        let round = next_round(&mut open).unwrap();
        assert_eq!(round.len(), BLOCKS_MAX);
        defer(&mut open, &round, |at| at % 1000 == 7);
        let expected = [7, 1007, 2007, BLOCKS_MAX, BLOCKS_MAX + 1, BLOCKS_MAX + 2];
        assert_eq!(next_round(&mut open).unwrap()[..6], expected);
        assert_eq!(next_round(&mut open), None);
    }
}
