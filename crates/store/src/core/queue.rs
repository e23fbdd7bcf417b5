//! A queue in parts: no operation under the store's lock moves more than one part of it.

use std::collections::VecDeque;

/// Most elements of one part.
pub(crate) const PART: usize = 256;

/// A queue whose growth copies no element, and which takes in another queue by its parts.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    /// In the order of their numbers. Only a single part may be empty.
    parts: VecDeque<Part<T>>,
    len: usize,
    /// The number of the next part at the end.
    next: i64,
}

/// Consecutive elements.
#[derive(Debug)]
struct Part<T> {
    /// Larger than those of the parts before it; stays the same while elements come and go.
    number: i64,
    elements: VecDeque<T>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { parts: VecDeque::new(), len: 0, next: 0 }
    }
}

impl<T> Queue<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn push_back(&mut self, element: T) {
        if self.parts.back().is_none_or(|part| part.elements.len() == PART) {
            self.parts.push_back(Part { number: self.next, elements: VecDeque::new() });
            self.next += 1;
        }
        self.parts.back_mut().expect("there is one now").elements.push_back(element);
        self.len += 1;
    }

    pub(crate) fn push_front(&mut self, element: T) {
        if self.parts.front().is_none_or(|part| part.elements.len() == PART) {
            let number = self.before_first();
            self.parts.push_front(Part { number, elements: VecDeque::new() });
        }
        self.parts.front_mut().expect("there is one now").elements.push_front(element);
        self.len += 1;
    }

    pub(crate) fn pop_front(&mut self) -> Option<T> {
        let part = self.parts.front_mut()?;
        let element = part.elements.pop_front()?;
        self.len -= 1;
        // The last part is kept, so that a short queue allocates nothing.
        if part.elements.is_empty() && self.parts.len() > 1 {
            self.parts.pop_front();
        }
        Some(element)
    }

    /// Removes at most `most` elements from the front.
    pub(crate) fn pop_some(&mut self, most: usize) -> Vec<T> {
        (0..most).map_while(|_| self.pop_front()).collect()
    }

    /// Takes all elements. Parts that are added later have later numbers.
    pub(crate) fn take(&mut self) -> Self {
        let next = self.next;
        std::mem::replace(self, Self { next, ..Self::default() })
    }

    /// Puts the elements of another queue before all others.
    pub(crate) fn prepend(&mut self, earlier: Self) {
        self.drop_empty();
        self.len += earlier.len;
        for part in earlier.parts.into_iter().rev().filter(|part| !part.elements.is_empty()) {
            let number = self.before_first();
            self.parts.push_front(Part { number, ..part });
        }
    }

    /// Puts the elements of another queue behind all others.
    pub(crate) fn append(&mut self, later: Self) {
        self.drop_empty();
        self.len += later.len;
        for part in later.parts.into_iter().filter(|part| !part.elements.is_empty()) {
            self.parts.push_back(Part { number: self.next, ..part });
            self.next += 1;
        }
    }

    /// The number after that of the last part.
    pub(crate) fn end(&self) -> i64 {
        self.next
    }

    /// Keeps only some elements of the first part whose number is `from` or later. Returns the
    /// number to go on with and the number of elements before; `None` if there is no such part.
    pub(crate) fn retain_part(
        &mut self,
        from: i64,
        keep: impl FnMut(&mut T) -> bool,
    ) -> Option<(i64, usize)> {
        let at = self.parts.partition_point(|part| part.number < from);
        let part = self.parts.get_mut(at)?;
        let (next, before) = (part.number + 1, part.elements.len());
        part.elements.retain_mut(keep);
        let after = part.elements.len();
        self.len -= before - after;
        if after == 0 && self.parts.len() > 1 {
            self.parts.remove(at);
        }
        Some((next, before))
    }

    /// Removes the part of a queue without elements, which must not stand between others.
    fn drop_empty(&mut self) {
        if self.len == 0 {
            self.parts.clear();
        }
    }

    fn before_first(&self) -> i64 {
        self.parts.front().map_or(self.next, |part| part.number) - 1
    }
}

impl<T> From<Vec<T>> for Queue<T> {
    fn from(elements: Vec<T>) -> Self {
        let mut queue = Self::default();
        for element in elements {
            queue.push_back(element);
        }
        queue
    }
}

impl<T> From<Queue<T>> for Vec<T> {
    fn from(queue: Queue<T>) -> Self {
        queue.parts.into_iter().flat_map(|part| part.elements).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elements of the parts, in their order, and that their number is right.
    fn lengths(queue: &Queue<usize>) -> Vec<usize> {
        let lengths: Vec<_> = queue.parts.iter().map(|part| part.elements.len()).collect();
        assert_eq!(lengths.iter().sum::<usize>(), queue.len());
        let mut numbers = queue.parts.iter().map(|part| part.number);
        assert!(numbers.clone().zip(numbers.by_ref().skip(1)).all(|(one, other)| one < other));
        lengths
    }

    fn numbers(range: std::ops::Range<usize>) -> Vec<usize> {
        range.collect()
    }

    #[test]
    fn elements_keep_their_order_at_both_ends() {
        let mut queue = Queue::default();
        (1000..2000).for_each(|number| queue.push_back(number));
        (0..1000).rev().for_each(|number| queue.push_front(number));
        assert!(lengths(&queue).iter().all(|length| *length <= PART));
        assert_eq!(queue.pop_some(300), numbers(0..300));
        assert_eq!(Vec::from(queue), numbers(300..2000));
        assert_eq!(Queue::<usize>::default().pop_front(), None);
    }

    #[test]
    fn no_element_moves_while_the_queue_grows_or_takes_in_another() {
        let mut queue: Queue<usize> = numbers(0..PART).into();
        let first = std::ptr::from_ref(&queue.parts[0].elements[0]);
        (PART..50_000).for_each(|number| queue.push_back(number));
        let mut all: Queue<usize> = numbers(50_000..60_000).into();
        all.prepend(queue.take());
        all.append(numbers(60_000..70_000).into());
        assert!(std::ptr::eq(first, &raw const all.parts[0].elements[0]), "it was not moved");
        assert!(lengths(&all).iter().all(|length| *length <= PART));
        assert!(queue.is_empty() && queue.end() > 0);
        // An empty part that is kept must not stand between others.
        queue.push_back(0);
        queue.pop_front();
        queue.append(vec![1, 2].into());
        queue.prepend(vec![0].into());
        assert_eq!(queue.pop_some(9), [0, 1, 2]);
        assert_eq!(Vec::from(all), numbers(0..70_000));
    }

    #[test]
    fn a_queue_is_walked_by_parts_while_it_changes() {
        let mut queue: Queue<usize> = numbers(0..2000).into();
        let (mut next, end) = (queue.end() - 8, queue.end());
        let (mut seen, mut last) = (Vec::new(), 0);
        while next < end {
            let keep = |number: &mut usize| {
                seen.push(*number);
                number.is_multiple_of(2)
            };
            let Some((after, length)) = queue.retain_part(next, keep) else { break };
            assert!(length <= PART && seen.len() - last == length);
            (next, last) = (after, seen.len());
            // From the front, which may be behind the walk or before it.
            queue.pop_some(100);
            queue.push_back(10_000);
        }
        lengths(&queue);
        let rest = Vec::from(queue.take());
        assert!(rest.iter().all(|number| number.is_multiple_of(2)), "each element was visited");
        assert!(seen.is_sorted(), "in their order");
        assert_eq!(queue.retain_part(0, |_| true), None);
    }
}
