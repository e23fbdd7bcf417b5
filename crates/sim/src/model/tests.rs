//! What the model allows and what it does not.

use cascade_runtime::simulated::Random;

use super::*;

fn content(owner: u32, number: u32) -> Content {
    Content { owner, number, length: 100 }
}

fn model(has_files: bool) -> Model {
    let mut profile = Profile::draw(&mut Random::new(0, 0));
    profile.key_count = 4;
    profile.shares_contents = false;
    profile.lengths = vec![100];
    profile.keeps_pool = false;
    let mut model = Model::new(&profile);
    model.promises = Promises {
        keeps_all: true,
        has_files,
        files_keep_all: has_files,
        survives_power_loss: false,
        has_faults: false,
    };
    model
}

fn put(model: &mut Model, key: u32, content: Content, result: PutResult) {
    let begin = model.begin_put(&[(key, content)]);
    model.end_put(begin, &[(key, content)], &[result]);
}

fn delete(model: &mut Model, key: u32) {
    let begin = model.begin_removal(Scope::Keys(vec![key]), false);
    model.end_removal(begin, false);
}

/// Whether a read of these bytes now, and one of nothing, are violations.
fn violations(model: &mut Model, key: u32, content: Content) -> (bool, bool) {
    let begin = model.begin();
    let is_hit_wrong = model.hit(begin, key, &content.bytes()).is_none();
    let is_miss_wrong = model.miss(begin, key, "a read");
    model.end(begin);
    (is_hit_wrong, is_miss_wrong)
}

#[test]
fn a_block_is_there_from_its_put_to_its_deletion() {
    let mut model = model(false);
    assert_eq!(violations(&mut model, 1, content(1, 0)), (true, false));
    put(&mut model, 1, content(1, 0), PutResult::Stored);
    assert_eq!(violations(&mut model, 1, content(1, 0)), (false, true));
    assert_eq!(violations(&mut model, 1, content(1, 1)), (true, true));
    assert_eq!(violations(&mut model, 2, content(1, 0)), (true, false));
    delete(&mut model, 1);
    assert_eq!(violations(&mut model, 1, content(1, 0)), (true, false));
    assert_eq!(model.findings.wrong_bytes, 4);
}

#[test]
fn calls_that_overlap_may_take_effect_in_either_order() {
    let mut model = model(false);
    let (old, new) = (content(1, 0), content(1, 1));
    put(&mut model, 1, old, PutResult::Stored);
    let read = model.begin();
    let removal = model.begin_removal(Scope::Keys(vec![1]), false);
    let putting = model.begin_put(&[(1, new)]);
    assert!(!model.miss(read, 1, "a read"));
    assert!(model.hit(read, 1, &old.bytes()).is_some());
    assert!(model.hit(read, 1, &new.bytes()).is_some());
    model.end_removal(removal, false);
    model.end_put(putting, &[(1, new)], &[PutResult::Stored]);
    // The put overlapped with the removal, so the new block may be gone; the old one is.
    assert_eq!(violations(&mut model, 1, new), (false, false));
    assert!(model.hit(read, 1, &old.bytes()).is_some());
    model.end(read);
    assert_eq!(violations(&mut model, 1, old), (true, false));
}

#[test]
fn a_second_block_is_not_stored_over_one_that_is_there() {
    let mut model = model(false);
    put(&mut model, 1, content(1, 0), PutResult::Stored);
    put(&mut model, 1, content(1, 0), PutResult::Present);
    put(&mut model, 1, content(1, 1), PutResult::Conflict);
    assert_eq!(model.findings.count, 0);
    put(&mut model, 1, content(1, 1), PutResult::Present);
    assert_eq!(model.findings.count, 1);
    put(&mut model, 1, content(1, 0), PutResult::Conflict);
    assert_eq!(model.findings.count, 2);
    put(&mut model, 1, content(1, 1), PutResult::Stored);
    assert_eq!(model.findings.count, 3);
}

#[test]
fn a_put_that_failed_may_have_stored_its_block() {
    let mut model = model(false);
    put(&mut model, 1, content(1, 0), PutResult::Failed);
    assert_eq!(violations(&mut model, 1, content(1, 0)), (false, false));
    put(&mut model, 1, content(1, 1), PutResult::Stored);
    assert_eq!(violations(&mut model, 1, content(1, 0)), (true, true));
}

fn flush(model: &mut Model) {
    let begin = model.begin();
    model.flushed(begin);
    model.end(begin);
}

#[test]
fn a_crash_leaves_what_was_flushed() {
    let mut model = model(true);
    let block = |key| content(key, 0);
    put(&mut model, 0, block(0), PutResult::Stored);
    put(&mut model, 1, block(1), PutResult::Stored);
    put(&mut model, 2, block(2), PutResult::Stored);
    delete(&mut model, 1);
    flush(&mut model);
    delete(&mut model, 2);
    put(&mut model, 3, block(3), PutResult::Stored);
    model.crashed(false);
    assert_eq!(violations(&mut model, 0, block(0)), (false, true), "flushed");
    assert_eq!(violations(&mut model, 1, block(1)), (true, false), "its removal was flushed");
    assert_eq!(violations(&mut model, 2, block(2)), (false, false), "its removal was not");
    assert_eq!(violations(&mut model, 3, block(3)), (false, false), "not flushed");
}

#[test]
fn nothing_is_left_of_memory() {
    let mut model = model(false);
    put(&mut model, 0, content(0, 0), PutResult::Stored);
    model.closed(true);
    assert_eq!(violations(&mut model, 0, content(0, 0)), (true, false));
}

#[test]
fn a_named_pool_keeps_what_was_put_and_not_what_was_removed() {
    for has_lost_power in [false, true] {
        let mut model = model(false);
        model.profile.keeps_pool = true;
        put(&mut model, 0, content(0, 0), PutResult::Stored);
        put(&mut model, 1, content(1, 0), PutResult::Stored);
        delete(&mut model, 1);
        let in_flight = model.begin_put(&[(2, content(2, 0))]);
        model.crashed(has_lost_power);
        assert!(!model.open.contains_key(&in_flight));
        let kept = (has_lost_power, !has_lost_power);
        assert_eq!(violations(&mut model, 0, content(0, 0)), kept);
        assert_eq!(violations(&mut model, 1, content(1, 0)), (true, false));
        assert_eq!(violations(&mut model, 2, content(2, 0)), (has_lost_power, false));
    }
}

#[test]
fn after_a_power_loss_files_that_are_not_durable_may_have_anything_old() {
    let mut model = model(true);
    for number in 0..3 {
        assert_eq!(model.number(0, number > 0), number);
        put(&mut model, 0, content(0, number), PutResult::Stored);
        delete(&mut model, 0);
        flush(&mut model);
    }
    model.crashed(true);
    for number in 0..3 {
        assert_eq!(violations(&mut model, 0, content(0, number)), (false, false));
    }
    assert_eq!(violations(&mut model, 0, content(0, 3)), (true, false), "it was never put");
    assert_eq!(violations(&mut model, 0, content(1, 0)), (true, false), "it is another key's");
    put(&mut model, 0, content(0, 3), PutResult::Stored);
    assert_eq!(violations(&mut model, 0, content(0, 1)), (true, true));
}
