//! The bodies of questions and answers.

use super::{WireError, u32_at};
use crate::limits::PIECE_BYTES_MAX;
use crate::question::{ANSWER_BLOCKS_MAX, QUESTION_BYTES_MAX};

/// Length of the number before a list.
const COUNT_BYTES: usize = 4;
/// Maximum length of the body of a question or an answer: a list of numbers, and a text.
pub(super) const BODY_BYTES_MAX: usize = COUNT_BYTES + 4 * ANSWER_BLOCKS_MAX + QUESTION_BYTES_MAX;

/// The body of a question or an answer: a count, as many numbers, and a text. The numbers of a
/// question are the lengths of its targets, those of an answer are the targets of its blocks.
///
/// # Panics
/// If there are more than 4 billion numbers.
pub fn write_numbered(numbers: &[u32], text: &[u8], into: &mut Vec<u8>) {
    let count = u32::try_from(numbers.len()).expect("at most ANSWER_BLOCKS_MAX");
    into.clear();
    into.extend_from_slice(&count.to_le_bytes());
    for number in numbers {
        into.extend_from_slice(&number.to_le_bytes());
    }
    into.extend_from_slice(text);
}

/// The numbers and the text of such a body.
pub fn read_numbered(body: &[u8]) -> Result<(Vec<u32>, &[u8]), WireError> {
    let rest = body.get(COUNT_BYTES..).ok_or(WireError::Field("count"))?;
    let count = u32_at(body, 0) as usize;
    let is_short = count <= ANSWER_BLOCKS_MAX && rest.len() >= 4 * count;
    let (numbers, text) =
        is_short.then(|| rest.split_at(4 * count)).ok_or(WireError::Field("count"))?;
    if text.len() > QUESTION_BYTES_MAX {
        return Err(WireError::Field("text"));
    }
    Ok(((0..count).map(|at| u32_at(numbers, 4 * at)).collect(), text))
}

/// The lengths of the pieces that carry a block: a checksum each.
pub(crate) fn pieces_of(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let most = usize::try_from(PIECE_BYTES_MAX).unwrap_or(usize::MAX);
    (0..bytes).step_by(most).map(move |at| (at, most.min(bytes - at)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_and_text_come_back(
            numbers in prop::collection::vec(any::<u32>(), 0..50),
            text in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut body = vec![9];
            write_numbered(&numbers, &text, &mut body);
            prop_assert_eq!(read_numbered(&body), Ok((numbers, &text[..])));
        }

        #[test]
        fn noise_is_read_or_refused_without_a_panic(
            body in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            if let Ok((numbers, text)) = read_numbered(&body) {
                prop_assert_eq!(4 + 4 * numbers.len() + text.len(), body.len());
            }
        }

        #[test]
        fn pieces_cover_a_block_without_gaps(bytes in 0_usize..3_000_000) {
            let mut next = 0;
            for (at, length) in pieces_of(bytes) {
                prop_assert!(at == next && (1..=256 << 10).contains(&length));
                next += length;
            }
            prop_assert_eq!(next, bytes);
        }
    }

    #[test]
    fn a_count_beyond_the_body_or_the_limit_is_refused() {
        for body in [&[][..], &[1, 0, 0], &[1, 0, 0, 0], &[2, 0, 0, 0, 1, 2, 3, 4]] {
            assert_eq!(read_numbered(body), Err(WireError::Field("count")), "{body:?}");
        }
        let mut long = vec![0; BODY_BYTES_MAX + 4];
        let most = u32::try_from(ANSWER_BLOCKS_MAX).expect("it is small");
        long[..4].copy_from_slice(&(most + 1).to_le_bytes());
        assert_eq!(read_numbered(&long), Err(WireError::Field("count")));
        long[..4].copy_from_slice(&most.to_le_bytes());
        assert_eq!(read_numbered(&long), Err(WireError::Field("text")));
    }
}
