//! The documents of `--enable-rag` as the original draws them: their lengths, and what is read.
//!
//! The original draws chunks from NumPy's generator, and all else from Python's.

use crate::compatible::mersenne_twister::MersenneTwister;
use crate::plan::Workload;
use crate::retrieval::{CHUNK_TOKENS, CHUNKS_READ, Documents};

/// Most bytes of a chunk, over all ranks.
const CHUNK_BYTES_MAX: u64 = 256 << 20;
/// Share of requests that read chunks, and share that is followed by a question about a document.
const READS_DOCUMENT: f64 = 0.1;
/// Tokens that the answer to such a question has.
const ANSWER_TOKENS: (u32, u32) = (50, 200);

/// The chunks of a document that a request reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectRetrieval {
    /// The document.
    pub document: u32,
    chunks: [u16; CHUNKS_READ],
    count: u8,
}

impl ObjectRetrieval {
    /// Different chunks, in the order in which they are read.
    pub fn chunks(&self) -> impl Iterator<Item = u32> {
        self.chunks.into_iter().take(usize::from(self.count)).map(u32::from)
    }
}

/// A question about a document: a request that stores nothing but its own context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) document: u32,
    pub(super) context_tokens: u32,
    pub(super) generated_tokens: u32,
}

/// The documents of a run, and the generator of chunks.
#[derive(Debug, Clone)]
pub struct ObjectDocuments {
    tokens: Vec<u32>,
    chunk_tokens: u32,
    chunk_random: MersenneTwister,
}

impl ObjectDocuments {
    /// The documents of a workload. `None` without any.
    pub(super) fn draw(workload: &Workload, random: &mut MersenneTwister) -> Option<Self> {
        let range = Documents::tokens(&workload.model);
        let tokens = (0..workload.documents.count).map(|_| random.between(range)).collect();
        let most = CHUNK_BYTES_MAX / workload.model.model_bytes_per_token.max(1);
        let chunk_tokens = u32::try_from(most.clamp(1, CHUNK_TOKENS)).unwrap_or(1);
        let chunk_random = MersenneTwister::of_numpy(workload.seed);
        let all = Self { tokens, chunk_tokens, chunk_random };
        (workload.documents.count > 0).then_some(all)
    }

    /// Their number.
    pub fn count(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    /// The tokens of each chunk of a document.
    pub fn chunks(&self, document: u32) -> impl Iterator<Item = u32> {
        let tokens = self.tokens.get(document as usize).copied().unwrap_or(0);
        let chunk = self.chunk_tokens;
        (0..tokens.div_ceil(chunk)).map(move |at| chunk.min(tokens - at * chunk))
    }

    /// What a request reads: chunks of a document in one of ten requests.
    pub(super) fn retrieval(&mut self, random: &mut MersenneTwister) -> Option<ObjectRetrieval> {
        (random.unit() < READS_DOCUMENT).then(|| self.choose(random))
    }

    /// The question that follows a request, in one of ten.
    pub(super) fn question(&mut self, random: &mut MersenneTwister) -> Option<Question> {
        if random.unit() >= READS_DOCUMENT {
            return None;
        }
        let chosen = self.choose(random);
        let tokens: Vec<u32> = self.chunks(chosen.document).collect();
        let context = chosen.chunks().filter_map(|chunk| tokens.get(chunk as usize)).sum();
        let generated_tokens = random.between(ANSWER_TOKENS);
        Some(Question { document: chosen.document, context_tokens: context, generated_tokens })
    }

    /// A document, and `numpy.random.choice` of its chunks without replacement: chunk `n` has a
    /// weight of `1 / n`.
    fn choose(&mut self, random: &mut MersenneTwister) -> ObjectRetrieval {
        let document = random.below(self.count());
        let count = self.chunks(document).count();
        let mut weights: Vec<f64> = (0..count).map(|at| 1.0 / (at + 1) as f64).collect();
        let sum: f64 = weights.iter().sum();
        for weight in &mut weights {
            *weight /= sum;
        }
        let mut found: Vec<usize> = Vec::new();
        while found.len() < CHUNKS_READ.min(count) {
            let missing = CHUNKS_READ.min(count) - found.len();
            let points: Vec<f64> = (0..missing).map(|_| self.chunk_random.unit()).collect();
            for at in &found {
                weights[*at] = 0.0;
            }
            let mut sums = Vec::with_capacity(count);
            let mut sum = 0.0;
            for weight in &weights {
                sum += weight;
                sums.push(sum);
            }
            for point in points {
                let at = sums.partition_point(|it| it / sum <= point).min(count - 1);
                if !found.contains(&at) {
                    found.push(at);
                }
            }
        }
        let mut chunks = [0; CHUNKS_READ];
        for (chunk, at) in chunks.iter_mut().zip(&found) {
            *chunk = u16::try_from(*at).unwrap_or(u16::MAX);
        }
        let count = u8::try_from(found.len()).unwrap_or(0);
        ObjectRetrieval { document, chunks, count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `numpy.random.seed(42)`, then four times `numpy.random.choice(10, 5, False, p)` with
    /// weights of 1 to a tenth.
    #[test]
    fn chunks_are_those_that_numpy_chooses() {
        let mut documents = ObjectDocuments {
            tokens: vec![5000],
            chunk_tokens: 512,
            chunk_random: MersenneTwister::of_numpy(42),
        };
        let mut random = MersenneTwister::new(1);
        for chunks in [[1, 8, 4, 2, 0], [0, 6, 2, 3, 1], [9, 5, 0, 2, 3], [1, 0, 2, 4, 5]] {
            let chosen = documents.choose(&mut random);
            assert_eq!((chosen.document, chosen.chunks().collect::<Vec<_>>()), (0, chunks.into()));
        }
        let tokens: Vec<u32> = documents.chunks(0).collect();
        assert_eq!((tokens.len(), tokens[0], tokens[9]), (10, 512, 392));
    }
}
