//! The limits: a plain socket with large messages, and memcpy.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use cascade_memory::copy_in;

use super::blocks::Sequence;
use super::{STREAM_BYTES, failed};
use crate::{MeasureError, timed};

/// Samples of a limit for each row.
const ROUNDS: usize = 5;

const STREAM_IS: &str = "one plain TCP stream on the same loopback: 128 MiB by one write, received \
                         by one read into a buffer of that length; median of 5 before each row";
const MEMCPY_IS: &str = "copies of the same blocks in the same order inside one process, the \
                         faster of memcpy and streaming stores; median of 5 before each row";

/// Samples, and what they are.
pub(super) type Limit = (Vec<f64>, &'static str);

/// What the limits need.
#[derive(Debug)]
pub(super) struct Limits {
    plain: TcpStream,
    source: Vec<u8>,
    target: Vec<u8>,
}

impl Limits {
    pub(super) fn connect(plain: &str, is_short: bool) -> Result<Self, MeasureError> {
        let plain = TcpStream::connect(plain).map_err(failed)?;
        plain.set_nodelay(true).map_err(failed)?;
        plain.set_read_timeout(Some(Duration::from_secs(60))).map_err(failed)?;
        let bytes = if is_short { STREAM_BYTES } else { STREAM_BYTES * 2 };
        Ok(Self { plain, source: vec![1; bytes], target: vec![2; bytes] })
    }

    /// The rate of a plain stream.
    pub(super) fn stream(&mut self) -> Result<Limit, MeasureError> {
        let mut samples = vec![];
        for _ in 0..ROUNDS {
            let mut sent = Ok(());
            let took = timed(|| {
                let mut answer = [0];
                let written = self.plain.write_all(&self.source[..STREAM_BYTES]);
                sent = written.and_then(|()| self.plain.read_exact(&mut answer));
            });
            sent.map_err(failed)?;
            samples.push(STREAM_BYTES as f64 / took.as_secs_f64() / 1e9);
        }
        Ok((samples, STREAM_IS))
    }

    /// The rate of copies of the row's blocks.
    pub(super) fn memcpy(&mut self, sequence: &Sequence) -> Limit {
        let bytes = usize::try_from(sequence.block_bytes).expect("a block fits memory");
        let places = self.source.len() / bytes;
        let blocks: Vec<_> = sequence
            .blocks(0, 0)
            .map(|(source, target)| {
                let place = |block| usize::try_from(block).expect("an index") % places * bytes;
                (place(source), place(target))
            })
            .collect();
        let mut plain = vec![];
        let mut streamed = vec![];
        for _ in 0..ROUNDS {
            plain.push(self.copy(&blocks, bytes, |target, source| target.copy_from_slice(source)));
            streamed.push(self.copy(&blocks, bytes, copy_in));
        }
        let is_plain = crate::figure::median(&plain) >= crate::figure::median(&streamed);
        (if is_plain { plain } else { streamed }, MEMCPY_IS)
    }

    fn copy(
        &mut self,
        blocks: &[(usize, usize)],
        bytes: usize,
        copy: impl Fn(&mut [u8], &[u8]),
    ) -> f64 {
        let took = timed(|| {
            for (source, target) in blocks {
                copy(
                    &mut self.target[*target..*target + bytes],
                    &self.source[*source..*source + bytes],
                );
            }
        });
        (blocks.len() * bytes) as f64 / took.as_secs_f64() / 1e9
    }
}
