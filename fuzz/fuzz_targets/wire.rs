//! Fuzzes the decoding of frames, calls and answers: no panic, and decoded values encode to the
//! same values.
//!
//! Most random inputs would fail the checksum of a frame. So every input is also used as the body
//! of a valid frame. The first two bytes of the input choose its kind.
#![no_main]

use cascade_wire::{Answer, Call, Frame, frame_length};
use libfuzzer_sys::fuzz_target;

fn read(bytes: &[u8]) {
    let Ok(Some(length)) = frame_length(bytes) else { return };
    let Some(bytes) = bytes.get(..length) else { return };
    let Ok(frame) = Frame::read(bytes) else { return };
    if let Ok(call) = Call::read(&frame) {
        let mut again = Vec::new();
        call.write(&mut again, frame.header.call, frame.trace).expect("the call was as short");
        let frame = Frame::read(&again).expect("it was just written");
        assert_eq!(Call::read(&frame).as_ref(), Ok(&call));
    }
    if let Ok(answer) = Answer::read(&frame) {
        let mut again = Vec::new();
        answer.write(&mut again, frame.header.call);
        let frame = Frame::read(&again).expect("it was just written");
        drop(Answer::read(&frame).expect("it was just written"));
    }
}

fuzz_target!(|bytes: &[u8]| {
    read(bytes);
    let [kind, is_answer, body @ ..] = bytes else { return };
    // All known kinds of calls (1 to 19) and answers (101 to 115), and unknown kinds beside them.
    let (first, count) = if is_answer % 2 == 1 { (100, 17) } else { (0, 21) };
    let kind = first + u16::from(*kind) % count;
    let mut frame = Vec::new();
    if Frame::write(&mut frame, kind, 7, None, |into| into.extend_from_slice(body)).is_ok() {
        read(&frame);
    }
});
