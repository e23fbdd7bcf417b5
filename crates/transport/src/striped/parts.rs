//! Divides a batch among streams. Pure.

use crate::piece::Piece;

/// Divides pieces into at most `parts_max` runs of about equal bytes, each of `bytes_min` or more.
/// The result is empty for a batch that one stream should carry.
pub(super) fn divide(pieces: &[Piece], parts_max: usize, bytes_min: u64) -> Vec<Vec<Piece>> {
    let total = pieces.iter().fold(0_u64, |sum, piece| sum.saturating_add(piece.bytes));
    let parts = usize::try_from(total / bytes_min).unwrap_or(usize::MAX).min(parts_max);
    if parts < 2 {
        return vec![];
    }
    let share = total.div_ceil(parts as u64);
    let mut divided = vec![vec![]];
    let mut room = share;
    for piece in pieces {
        let mut rest = *piece;
        while rest.bytes > room {
            // An offset that overflows is out of bounds; the check of bounds refuses the whole.
            let (Some(local), Some(remote)) = (rest.local.after(room), rest.remote.after(room))
            else {
                break;
            };
            push(&mut divided, Piece { bytes: room, ..rest });
            rest = Piece { local, remote, bytes: rest.bytes - room };
            divided.push(vec![]);
            room = share;
        }
        room = room.saturating_sub(rest.bytes);
        push(&mut divided, rest);
    }
    divided.retain(|part| !part.is_empty());
    divided
}

fn push(divided: &mut [Vec<Piece>], piece: Piece) {
    if let Some(last) = divided.last_mut().filter(|_| piece.bytes > 0) {
        last.push(piece);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::piece::{Place, RegionId};

    fn piece(local: u64, remote: u64, bytes: u64) -> Piece {
        Piece {
            local: Place { region: RegionId(0), offset: local },
            remote: Place { region: RegionId(1), offset: remote },
            bytes,
        }
    }

    #[test]
    fn a_small_batch_is_not_divided() {
        assert_eq!(divide(&[piece(0, 0, 199)], 4, 100), Vec::<Vec<Piece>>::new());
        assert_eq!(divide(&[], 4, 100), Vec::<Vec<Piece>>::new());
    }

    #[test]
    fn a_long_piece_is_cut() {
        let parts = divide(&[piece(0, 1000, 300)], 4, 100);
        assert_eq!(
            parts,
            [[piece(0, 1000, 100)], [piece(100, 1100, 100)], [piece(200, 1200, 100)]]
        );
    }

    proptest! {
        #[test]
        fn parts_have_all_bytes_in_order_and_about_equal_shares(
            lengths in prop::collection::vec(0_u64..500, 0..40),
            parts_max in 2_usize..6,
        ) {
            let mut at = 0;
            let pieces: Vec<_> = lengths
                .iter()
                .map(|bytes| {
                    at += bytes + 7;
                    piece(at, at + 10_000, *bytes)
                })
                .collect();
            let parts = divide(&pieces, parts_max, 100);
            prop_assert!(parts.len() <= parts_max && parts.len() != 1);
            let total: u64 = lengths.iter().sum();
            let bytes_of = |pieces: &[Piece]| -> Vec<(u64, u64)> {
                let bytes = pieces.iter().flat_map(|it| {
                    (0..it.bytes).map(|n| (it.local.offset + n, it.remote.offset + n))
                });
                bytes.collect()
            };
            if !parts.is_empty() {
                let all: Vec<_> = parts.iter().flat_map(|part| bytes_of(part)).collect();
                prop_assert_eq!(all, bytes_of(&pieces));
                let share = total.div_ceil(parts_max.min((total / 100) as usize) as u64);
                for part in &parts {
                    let bytes: u64 = part.iter().map(|piece| piece.bytes).sum();
                    prop_assert!(bytes <= share);
                }
            }
        }
    }
}
