//! A vector that grows without moving its elements: by one chunk, not by a copy of everything.

use std::ops::{Index, IndexMut};

/// Elements in chunks of `1 << BITS`: 4,096, or fewer if they are large. A push under the lock
/// copies at most the elements of the first chunk.
#[derive(Debug)]
pub(crate) struct Chunks<T, const BITS: usize = 12> {
    chunks: Vec<Vec<T>>,
    len: usize,
}

impl<T, const BITS: usize> Default for Chunks<T, BITS> {
    fn default() -> Self {
        Self { chunks: Vec::new(), len: 0 }
    }
}

impl<T, const BITS: usize> Chunks<T, BITS> {
    const CHUNK: usize = 1 << BITS;

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        self.chunks.get(index >> BITS)?.get(index & (Self::CHUNK - 1))
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.chunks.get_mut(index >> BITS)?.get_mut(index & (Self::CHUNK - 1))
    }

    pub(crate) fn push(&mut self, element: T) {
        let chunk = self.len >> BITS;
        if chunk == self.chunks.len() {
            // The first chunk grows with its use: most tiers of a test or a shadow are small.
            let reserved = if chunk == 0 { 0 } else { Self::CHUNK };
            self.chunks.push(Vec::with_capacity(reserved));
        }
        self.chunks[chunk].push(element);
        self.len += 1;
    }

    pub(crate) fn pop(&mut self) -> Option<T> {
        let last = self.len.checked_sub(1)?;
        self.len = last;
        // Chunks that became empty are kept for later pushes.
        self.chunks[last >> BITS].pop()
    }

    /// Removes an element and moves the last one to its place.
    pub(crate) fn swap_remove(&mut self, index: usize) {
        if let Some(last) = self.pop()
            && index < self.len
        {
            self[index] = last;
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flatten()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.capacity() * size_of::<T>()).sum()
    }
}

impl<T, const BITS: usize> Index<usize> for Chunks<T, BITS> {
    type Output = T;

    fn index(&self, index: usize) -> &T {
        &self.chunks[index >> BITS][index & (Self::CHUNK - 1)]
    }
}

impl<T, const BITS: usize> IndexMut<usize> for Chunks<T, BITS> {
    fn index_mut(&mut self, index: usize) -> &mut T {
        &mut self.chunks[index >> BITS][index & (Self::CHUNK - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: usize = Chunks::<usize>::CHUNK;

    #[test]
    fn elements_stay_in_place_while_it_grows_and_shrinks() {
        let mut chunks: Chunks<usize> = Chunks::default();
        for number in 0..CHUNK {
            chunks.push(number);
        }
        let first = std::ptr::from_ref(&chunks[0]);
        for number in CHUNK..3 * CHUNK {
            chunks.push(number);
        }
        assert!(std::ptr::eq(first, &raw const chunks[0]), "no element was moved");
        assert!(chunks.iter().copied().eq(0..3 * CHUNK));
        chunks.swap_remove(1);
        assert_eq!((chunks[1], chunks.len()), (3 * CHUNK - 1, 3 * CHUNK - 1));
        chunks.swap_remove(3 * CHUNK - 2);
        let reserved = chunks.memory_bytes();
        while chunks.len() > 1 {
            chunks.pop();
        }
        assert_eq!((chunks.get(0), chunks.get(1)), (Some(&0), None));
        (0..CHUNK).for_each(|number| chunks.push(number));
        assert_eq!((chunks[CHUNK], chunks.memory_bytes()), (CHUNK - 1, reserved));
    }
}
