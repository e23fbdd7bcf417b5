//! Copies over the fake driver: their order, their borders, and whose their memory is.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]

use std::sync::Arc;
use std::time::Duration;

use cascade_device::{
    BatchForm, Context, Copier, Copy, CudaError, CudaMemory, CudaMemoryConfig, DeviceAllocation,
    Driver, RegisteredPool,
};
use cascade_memory::{DeviceError, DeviceMemory as _, Pool};
use cascade_runtime::{Deadline, SystemClock};

use crate::fake::{
    assert_nothing_left, context, count, empty, hold, is_child, pattern, piece, pool, registered,
    release, slab, soon,
};

const MIB: usize = 1 << 20;
/// A page that lies in one registration, so that its copy is no batch.
const PAGE: usize = 64 << 10;

/// A device with some memory, and a pool that is registered with it.
struct Bench {
    context: Arc<Context>,
    memory: Arc<DeviceAllocation>,
    pool: Pool,
    registered: Arc<RegisteredPool>,
}

impl Bench {
    fn new() -> Self {
        let context = context();
        let memory = DeviceAllocation::new(&context, 4 * MIB).unwrap();
        let pool = pool(4 * MIB);
        let registered = registered(&context, &pool, 256 << 10);
        Self { context, memory, pool, registered }
    }

    fn copier(&self) -> Copier {
        Copier::new(&self.context, Arc::clone(&self.registered)).unwrap()
    }

    fn write(&self, copier: &Copier, offset: usize, bytes: &[u8]) {
        let target = piece(&self.memory, offset, bytes.len());
        let copy = Copy::ToDevice { source: slab(&self.pool, bytes), target };
        copier.submit(vec![copy], None).unwrap().wait(soon()).unwrap();
    }

    fn save(&self, offset: usize, bytes: usize) -> Copy {
        let target = empty(&self.pool, bytes);
        Copy::ToHost { source: piece(&self.memory, offset, bytes), target }
    }

    fn read(&self, copier: &Copier, offset: usize, bytes: usize) -> Vec<u8> {
        let copies = vec![self.save(offset, bytes)];
        saved(copier.submit(copies, None).unwrap().wait(soon()).unwrap().unwrap().remove(0))
    }
}

fn saved(copy: Copy) -> Vec<u8> {
    let Copy::ToHost { target, .. } = copy else { panic!("{copy:?}") };
    target.to_vec()
}

/// A save that does not wait for the kernel that writes the page stores the page's old bytes:
/// wrong KV under a right key.
#[test]
fn a_save_without_an_event_reads_old_bytes_and_one_with_it_does_not() {
    if !is_child("a_save_without_an_event_reads_old_bytes_and_one_with_it_does_not", &[]) {
        return;
    }
    let bench = Bench::new();
    let (compute, saves) = (bench.copier(), bench.copier());
    let (old, new) = (pattern(1, PAGE), pattern(2, PAGE));
    bench.write(&compute, 0, &old);
    bench.write(&compute, PAGE, &new);
    hold("cuMemcpyDtoDAsync_v2");
    let (source, target) = (piece(&bench.memory, PAGE, PAGE), piece(&bench.memory, 0, PAGE));
    let mut written = compute.submit(vec![Copy::Within { source, target }], None).unwrap();
    let event = compute.stream().record().unwrap();
    assert!(bench.read(&saves, 0, PAGE) == old, "the fake shows the race");
    let mut pending = saves.submit(vec![bench.save(0, PAGE)], Some(&event)).unwrap();
    assert!(!pending.is_over().unwrap() && !event.is_over().unwrap());
    release();
    let copies = pending.wait(soon()).unwrap().unwrap();
    assert!(saved(copies.into_iter().next().unwrap()) == new);
    written.wait(soon()).unwrap();
    drop((written, pending, event, compute, saves, bench));
    assert_nothing_left();
}

/// A kernel that does not wait for the load of its page computes with the page's old bytes.
#[test]
fn compute_without_an_event_reads_old_bytes_and_compute_with_it_does_not() {
    if !is_child("compute_without_an_event_reads_old_bytes_and_compute_with_it_does_not", &[]) {
        return;
    }
    let bench = Bench::new();
    let (compute, loads) = (bench.copier(), bench.copier());
    let (old, new) = (pattern(1, PAGE), pattern(2, PAGE));
    bench.write(&loads, 0, &old);
    hold("cuMemcpyHtoDAsync_v2");
    let target = piece(&bench.memory, 0, PAGE);
    let load = Copy::ToDevice { source: slab(&bench.pool, &new), target };
    let mut loaded = loads.submit(vec![load], None).unwrap();
    let event = loads.stream().record().unwrap();
    let result = |at: usize| {
        let (source, target) = (piece(&bench.memory, 0, PAGE), piece(&bench.memory, at, PAGE));
        vec![Copy::Within { source, target }]
    };
    compute.submit(result(PAGE), None).unwrap().wait(soon()).unwrap();
    assert!(bench.read(&compute, PAGE, PAGE) == old, "the fake shows the race");
    let mut computed = compute.submit(result(2 * PAGE), Some(&event)).unwrap();
    assert!(!computed.is_over().unwrap());
    release();
    computed.wait(soon()).unwrap();
    assert!(bench.read(&compute, 2 * PAGE, PAGE) == new);
    assert_eq!(loaded.wait(soon()).unwrap().unwrap().len(), 1);
}

/// Copies of one batch have no order, and those of two submissions have the stream's.
#[test]
fn copies_of_a_batch_have_no_order() {
    if !is_child("copies_of_a_batch_have_no_order", &[("FAKE_CUDA_SEED", "7")]) {
        return;
    }
    let bench = Bench::new();
    let copier = bench.copier();
    let new = pattern(3, 4096);
    bench.write(&copier, 0, &new);
    let chain = |first: usize| {
        (first..first + 16).map(|at| Copy::Within {
            source: piece(&bench.memory, at * 4096, 4096),
            target: piece(&bench.memory, (at + 1) * 4096, 4096),
        })
    };
    copier.submit(chain(0).collect(), None).unwrap().wait(soon()).unwrap();
    assert!(bench.read(&copier, 16 * 4096, 4096) != new, "the fake reorders a batch");
    let mut pending: Vec<_> =
        chain(0).map(|copy| copier.submit(vec![copy], None).unwrap()).collect();
    for pending in &mut pending {
        pending.wait(soon()).unwrap();
    }
    assert!(bench.read(&copier, 16 * 4096, 4096) == new);
}

#[test]
fn a_pool_is_registered_in_pieces_and_no_copy_crosses_a_border() {
    if !is_child("a_pool_is_registered_in_pieces_and_no_copy_crosses_a_border", &[]) {
        return;
    }
    let bench = Bench::new();
    let report = bench.registered.report();
    assert_eq!((report.pieces, report.registered_bytes), (16, 4 * MIB));
    assert_eq!((report.staged_bytes, report.refusal.is_none()), (0, true));
    let copier = bench.copier();
    let before = count("copies");
    let bytes = pattern(9, 600 << 10);
    bench.write(&copier, 4096, &bytes);
    let pieces = count("copies") - before;
    assert!((3..=4).contains(&pieces), "600 KiB over pieces of 256 are 3 or 4 copies: {pieces}");
    assert!(bench.read(&copier, 4096, bytes.len()) == bytes);
    assert_eq!(count("cuMemHostRegister_v2"), 16);
    drop((copier, bench));
    assert_eq!(count("cuMemHostUnregister"), 16);
    assert_nothing_left();
}

/// A refusal (a limit on locked memory, say) leaves a pool that works, more slowly.
#[test]
fn what_is_not_registered_is_copied_through_a_small_buffer_and_said() {
    let refuses = [("FAKE_CUDA_FAIL", "cuMemHostRegister_v2=2@3")];
    if !is_child("what_is_not_registered_is_copied_through_a_small_buffer_and_said", &refuses) {
        return;
    }
    let bench = Bench::new();
    let report = bench.registered.report();
    assert_eq!((report.pieces, report.staged_bytes), (2, 4 * MIB - (512 << 10)));
    let refusal = report.refusal.as_ref().unwrap().to_string();
    assert!(refusal.contains("cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY"), "{refusal}");
    let copier = bench.copier();
    let bytes: Vec<Vec<u8>> = (0..4).map(|seed| pattern(seed, 700 << 10)).collect();
    // The first slabs lie on both sides of the last border.
    let slabs: Vec<_> = bytes.iter().map(|bytes| slab(&bench.pool, bytes)).collect();
    for (at, source) in slabs.into_iter().enumerate() {
        let target = piece(&bench.memory, at * MIB, bytes[at].len());
        let copy = Copy::ToDevice { source, target };
        copier.submit(vec![copy], None).unwrap().wait(soon()).unwrap();
    }
    let saves = (0..4).map(|at| bench.save(at * MIB, bytes[at].len())).collect();
    let mut pending = copier.submit(saves, None).unwrap();
    for (copy, bytes) in pending.wait(soon()).unwrap().unwrap().into_iter().zip(&bytes) {
        assert!(saved(copy) == *bytes);
    }
    drop((pending, copier, bench));
    assert_nothing_left();
}

#[test]
fn slabs_of_another_pool_and_wrong_lengths_are_refused() {
    if !is_child("slabs_of_another_pool_and_wrong_lengths_are_refused", &[]) {
        return;
    }
    let bench = Bench::new();
    let copier = bench.copier();
    let other = pool(MIB);
    let target = piece(&bench.memory, 0, 4096);
    let copy = Copy::ToDevice { source: slab(&other, &[1; 4096]), target: target.clone() };
    let error = copier.submit(vec![copy], None).expect_err("another pool");
    assert!(matches!(error, CudaError::OtherPool), "{error}");
    let copy = Copy::ToDevice { source: slab(&bench.pool, &[1; 8192]), target };
    let error = copier.submit(vec![copy], None).expect_err("longer than its target");
    assert!(matches!(error, CudaError::Lengths { source_bytes: 8192, .. }), "{error}");
    let error = bench.memory.piece(4 * MIB - 1, 2).expect_err("over the end");
    assert!(matches!(error, CudaError::Outside { .. }), "{error}");
    bench.memory.piece(usize::MAX, 2).expect_err("over the end of addresses");
    let device = DeviceAllocation::new(&bench.context, 0);
    assert!(device.is_ok_and(|memory| memory.piece(0, 1).is_err()));
    assert_eq!(bench.pool.stats().reserved_bytes, 0, "refused slabs were freed");
}

fn batch_round_trip(expected: Option<BatchForm>, calls: &str) {
    let bench = Bench::new();
    let copier = bench.copier();
    let bytes: Vec<Vec<u8>> = (0..20).map(|seed| pattern(seed, 64 << 10)).collect();
    let loads = bytes.iter().enumerate().map(|(at, bytes)| Copy::ToDevice {
        source: slab(&bench.pool, bytes),
        target: piece(&bench.memory, at * (64 << 10), 64 << 10),
    });
    copier.submit(loads.collect(), None).unwrap().wait(soon()).unwrap();
    let saves = (0..20).map(|at| bench.save(at * (64 << 10), 64 << 10)).collect();
    let copies = copier.submit(saves, None).unwrap().wait(soon()).unwrap().unwrap();
    assert_eq!(copies.len(), 20);
    for (copy, bytes) in copies.into_iter().zip(&bytes) {
        assert!(saved(copy) == *bytes);
    }
    assert_eq!(copier.batch_form(), expected);
    assert!(count(calls) > 0, "{calls} was called");
    drop((copier, bench));
    assert_nothing_left();
}

#[test]
fn batches_use_the_form_of_cuda_12() {
    if is_child("batches_use_the_form_of_cuda_12", &[("FAKE_CUDA_VERSION", "12080")]) {
        batch_round_trip(Some(BatchForm::WithIndex), "cuMemcpyBatchAsync");
        assert_eq!(count("cuMemcpyHtoDAsync_v2"), 0);
    }
}

#[test]
fn batches_use_the_form_of_cuda_13() {
    if is_child("batches_use_the_form_of_cuda_13", &[]) {
        batch_round_trip(Some(BatchForm::WithoutIndex), "cuMemcpyBatchAsync_v2");
        assert_eq!(count("cuMemcpyBatchAsync"), 0, "the other form has other arguments");
    }
}

#[test]
fn without_a_batch_each_copy_is_a_call() {
    if is_child("without_a_batch_each_copy_is_a_call", &[("FAKE_CUDA_VERSION", "12040")]) {
        batch_round_trip(None, "cuMemcpyHtoDAsync_v2");
    }
}

#[test]
fn a_batch_that_is_refused_becomes_calls() {
    let refuses = [("FAKE_CUDA_FAIL", "cuMemcpyBatchAsync_v2=801")];
    if is_child("a_batch_that_is_refused_becomes_calls", &refuses) {
        batch_round_trip(None, "cuMemcpyHtoDAsync_v2");
        assert_eq!(count("cuMemcpyBatchAsync_v2"), 1, "it is not tried again");
    }
}

#[test]
fn a_long_batch_is_several_calls() {
    if !is_child("a_long_batch_is_several_calls", &[]) {
        return;
    }
    let bench = Bench::new();
    let copier = bench.copier();
    let bytes = pattern(5, 5000 * 64);
    bench.write(&copier, 0, &bytes);
    let before = count("cuMemcpyBatchAsync_v2");
    let copies = (0..5000).map(|at| Copy::Within {
        source: piece(&bench.memory, at * 64, 64),
        target: piece(&bench.memory, MIB + at * 64, 64),
    });
    copier.submit(copies.collect(), None).unwrap().wait(soon()).unwrap();
    assert_eq!(count("cuMemcpyBatchAsync_v2") - before, 2);
    assert!(bench.read(&copier, MIB, bytes.len()) == bytes);
}

/// A slab that came back before its copy was over would be written by the device under its next
/// owner.
#[test]
fn slabs_of_copies_that_nobody_waits_for_come_back_only_when_these_are_over() {
    let name = "slabs_of_copies_that_nobody_waits_for_come_back_only_when_these_are_over";
    if !is_child(name, &[]) {
        return;
    }
    let bench = Bench::new();
    let copier = bench.copier();
    hold("cuMemcpyDtoHAsync_v2");
    let pending = copier.submit(vec![bench.save(0, PAGE)], None).unwrap();
    let mut late = copier.submit(vec![bench.save(PAGE, PAGE)], None).unwrap();
    let passed = Deadline::after(&SystemClock, Duration::ZERO);
    let error = late.wait(passed).expect_err("held");
    assert!(matches!(error, CudaError::TimedOut { .. }), "{error}");
    drop(pending);
    let reserved = || bench.pool.stats().reserved_bytes;
    assert_eq!(reserved(), 2 * PAGE, "the device may still write both");
    release();
    assert_eq!(late.wait(soon()).unwrap().unwrap().len(), 1, "it could be waited for again");
    copier.submit(Vec::new(), None).unwrap().wait(soon()).unwrap();
    copier.submit(Vec::new(), None).unwrap();
    assert_eq!(reserved(), 0);
    drop((late, copier, bench));
    assert_nothing_left();
}

#[test]
fn a_copier_that_is_dropped_waits_for_its_copies() {
    let delay = [("FAKE_CUDA_DELAY_US", "cuMemcpyDtoHAsync_v2=20000")];
    if !is_child("a_copier_that_is_dropped_waits_for_its_copies", &delay) {
        return;
    }
    let bench = Bench::new();
    let copier = bench.copier();
    drop(copier.submit(vec![bench.save(0, PAGE)], None).unwrap());
    drop(copier);
    assert_eq!(bench.pool.stats().reserved_bytes, 0);
    drop(bench);
    assert_nothing_left();
}

fn memory(copy_timeout: Duration) -> Arc<CudaMemory> {
    let driver = Driver::load().unwrap();
    let config = CudaMemoryConfig { copy_timeout, ..CudaMemoryConfig::new(4 * MIB) };
    CudaMemory::new(&driver, &config, Arc::new(SystemClock)).unwrap()
}

#[test]
fn a_dead_context_fails_all_later_calls_without_asking_the_driver() {
    let dies = [("FAKE_CUDA_DIE_AT_COPY", "2")];
    if !is_child("a_dead_context_fails_all_later_calls_without_asking_the_driver", &dies) {
        return;
    }
    let memory = memory(Duration::from_secs(30));
    memory.copy_in(0, &[1; 4096]).unwrap();
    let mut bytes = [0; 4096];
    let error = memory.copy_out(0, &mut bytes).expect_err("the context died");
    let DeviceError::Failed { source, .. } = &error else { panic!("{error}") };
    assert!(source.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{source}");
    let asked = count("cuCtxPushCurrent_v2");
    for _ in 0..3 {
        assert!(matches!(memory.copy_out(0, &mut bytes), Err(DeviceError::Lost)));
        assert!(matches!(memory.copy_in(0, &bytes), Err(DeviceError::Lost)));
        assert!(matches!(memory.zero(0, 100), Err(DeviceError::Lost)));
    }
    let poison = memory.context().poison().unwrap().to_string();
    assert!(poison.contains("(700)"), "{poison}");
    drop(memory);
    assert_eq!(count("cuCtxPushCurrent_v2"), asked);
}

/// A device that hangs costs one time limit, and then nothing.
#[test]
fn a_device_that_hangs_is_lost_after_the_time_limit() {
    let hangs = [("FAKE_CUDA_HOLD", "cuMemcpyHtoDAsync_v2")];
    if !is_child("a_device_that_hangs_is_lost_after_the_time_limit", &hangs) {
        return;
    }
    let memory = memory(Duration::from_millis(20));
    let error = memory.copy_in(0, &[1; 4096]).expect_err("held");
    let DeviceError::Failed { source, .. } = &error else { panic!("{error}") };
    assert!(source.to_string().contains("nvidia-smi"), "{source}");
    assert!(matches!(memory.copy_in(0, &[1; 4096]), Err(DeviceError::Lost)));
    // The copy goes on after all: the buffer that it reads was not freed.
    release();
    drop(memory);
    assert_eq!(count("misused"), 0);
}

#[test]
fn copies_of_several_threads_share_the_buffers() {
    if !is_child("copies_of_several_threads_share_the_buffers", &[]) {
        return;
    }
    let memory = memory(Duration::from_secs(30));
    std::thread::scope(|scope| {
        for thread in 0..8_u8 {
            let memory = &memory;
            scope.spawn(move || {
                let offset = usize::from(thread) * (MIB / 2);
                for round in 0..4 {
                    let bytes = pattern(thread * 16 + round, MIB / 2);
                    memory.copy_in(offset, &bytes).unwrap();
                    let mut read = vec![0; bytes.len()];
                    memory.copy_out(offset, &mut read).unwrap();
                    assert!(read == bytes, "thread {thread}");
                }
            });
        }
    });
    memory.zero(100, MIB).unwrap();
    let mut read = vec![1; MIB + 200];
    memory.copy_out(0, &mut read).unwrap();
    assert!(read[100..100 + MIB].iter().all(|byte| *byte == 0));
    assert!(read[..100] == pattern(3, MIB / 2)[..100]);
    let outside = memory.copy_in(4 * MIB - 1, &[0; 2]).expect_err("over the end");
    assert!(matches!(outside, DeviceError::Failed { operation: "write", .. }), "{outside}");
    memory.zero(usize::MAX, 2).expect_err("over the end");
    memory.copy_in(4 * MIB, &[]).unwrap();
    drop(memory);
    assert_nothing_left();
}
