//! Fuzzes the decoding of the transport's messages: no panic, and decoded values encode to the same
//! values.
//!
//! Random bytes fail the checksum of a header, so the input is also used as its fields.
#![no_main]

use cascade_transport::wire::{
    BODY_BYTES_MAX, Challenge, HEADER_BYTES, Header, Hello, Kind, Welcome, entries, read_numbered,
    write_numbered,
};
use libfuzzer_sys::fuzz_target;

fn read_header(bytes: &[u8; HEADER_BYTES], body: &[u8]) {
    let Ok(header) = Header::parse(bytes) else { return };
    assert_eq!(Header::parse(&header.to_bytes()), Ok(header));
    if matches!(header.kind, Kind::Write | Kind::Read | Kind::Map) {
        let length = header.body_bytes as usize;
        assert!(length <= BODY_BYTES_MAX && header.notice_bytes() <= length);
        let body: Vec<u8> = body.iter().copied().chain(std::iter::repeat(0)).take(length).collect();
        assert_eq!(entries(&body, header.pieces).count(), header.pieces as usize);
    }
}

fuzz_target!(|bytes: &[u8]| {
    if let Some((header, body)) = bytes.split_first_chunk() {
        read_header(header, body);
        let fields = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four"));
        let kinds = [
            Kind::Write,
            Kind::Read,
            Kind::Map,
            Kind::Done,
            Kind::Data,
            Kind::Hello,
            Kind::Ask,
            Kind::Answer,
        ];
        let forged = Header {
            status: header[0],
            pieces: fields(4),
            body_bytes: fields(8),
            payload_bytes: u64::from(fields(12)) << (header[2] % 33),
            ..Header::new(kinds[usize::from(header[1]) % kinds.len()], 7)
        };
        read_header(&forged.to_bytes(), body);
    }
    if let Ok((numbers, text)) = read_numbered(bytes) {
        let mut body = vec![];
        write_numbered(&numbers, text, &mut body);
        assert_eq!(body, bytes);
    }
    if let Ok(hello) = Hello::parse(bytes) {
        assert_eq!(Hello::parse(&hello.to_bytes()).as_ref(), Ok(&hello));
    }
    if let Ok(challenge) = Challenge::parse(bytes) {
        assert_eq!(challenge.to_bytes(), bytes);
    }
    if let Ok(welcome) = Welcome::parse(bytes) {
        assert_eq!(Welcome::parse(&welcome.to_bytes()).as_ref(), Ok(&welcome));
    }
});
