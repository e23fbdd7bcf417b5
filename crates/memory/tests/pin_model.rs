//! Every order in which two or three threads can use a pin word: `RUSTFLAGS="--cfg loom" cargo
//! test -p cascade-memory --test pin_model --release`. A failure means that a reader could see a
//! block change, or read another block than it asked for.
#![cfg(loom)]
#![expect(unsafe_code, reason = "loom's cell stands for the bytes that the word guards")]

use cascade_memory::PinWord;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// A slot whose bytes say of which round they are.
struct Slot {
    word: PinWord,
    bytes: UnsafeCell<u64>,
}

// SAFETY: the pin word decides who may touch the bytes; loom fails the test when it does not.
unsafe impl Sync for Slot {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Slot {}

impl Slot {
    fn write(&self, value: u64) {
        // SAFETY: called by the one owner of a slot that is being loaded.
        self.bytes.with_mut(|bytes| unsafe { *bytes = value });
    }

    fn read(&self) -> u64 {
        // SAFETY: called while pinned.
        self.bytes.with(|bytes| unsafe { *bytes })
    }
}

fn sealed_slot() -> (Arc<Slot>, cascade_memory::Generation) {
    let slot = Arc::new(Slot { word: PinWord::new(), bytes: UnsafeCell::new(0) });
    let generation = slot.word.try_load().expect("a new slot is empty");
    slot.write(1);
    slot.word.seal();
    (slot, generation)
}

#[test]
fn a_pinned_block_stays_while_others_evict_and_reload_the_slot() {
    loom::model(|| {
        let (slot, first) = sealed_slot();
        let reader = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || {
                if slot.word.try_pin(first) {
                    assert_eq!(slot.read(), 1);
                    slot.word.unpin();
                }
            })
        };
        if slot.word.try_condemn(first) {
            assert!(!slot.word.try_pin(first));
            slot.word.clear();
            let second = slot.word.try_load().expect("we cleared it, nobody else loads");
            assert_ne!(first, second);
            slot.write(2);
            slot.word.seal();
        }
        reader.join().expect("the reader's checks hold");
    });
}

#[test]
fn of_two_who_evict_one_succeeds_and_no_reader_sees_it() {
    loom::model(|| {
        let (slot, first) = sealed_slot();
        let evict = |slot: Arc<Slot>| {
            thread::spawn(move || {
                let condemned = slot.word.try_condemn(first);
                if condemned {
                    slot.write(0);
                }
                condemned
            })
        };
        let (one, other) = (evict(Arc::clone(&slot)), evict(Arc::clone(&slot)));
        let pinned = slot.word.try_pin(first);
        if pinned {
            assert_eq!(slot.read(), 1);
            slot.word.unpin();
        }
        let condemned = [one, other].map(|thread| thread.join().expect("checks hold"));
        assert!(!(condemned[0] && condemned[1]));
        assert!(pinned || condemned[0] || condemned[1], "a pin fails only once condemned");
    });
}

#[test]
fn an_empty_slot_is_loaded_by_one() {
    loom::model(|| {
        let slot = Arc::new(Slot { word: PinWord::new(), bytes: UnsafeCell::new(0) });
        let load = |slot: Arc<Slot>, value| {
            thread::spawn(move || {
                let generation = slot.word.try_load()?;
                slot.write(value);
                slot.word.seal();
                Some((generation, value))
            })
        };
        let (one, other) = (load(Arc::clone(&slot), 1), load(Arc::clone(&slot), 2));
        let loaded = [one, other].map(|thread| thread.join().expect("checks hold"));
        let mut winners = loaded.into_iter().flatten();
        let (generation, value) = winners.next().expect("one finds it empty");
        assert!(winners.next().is_none());
        assert!(slot.word.try_pin(generation));
        assert_eq!(slot.read(), value);
    });
}
