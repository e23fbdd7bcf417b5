//! Retrieval-augmented generation: documents in chunks, of which some requests read a few.

use cascade_replay::random::{SplitMix64, mix};

use crate::model::KvModel;

/// Tokens of a chunk. It takes whole blocks.
pub const CHUNK_TOKENS: u64 = 512;
/// Chunks that a request reads.
pub const CHUNKS_READ: usize = 5;
/// Share of requests that read some.
const HAS_RETRIEVAL: f64 = 0.1;
/// Layers from which on a model has short documents.
const LAYERS_OF_LARGE: u32 = 64;

/// The documents of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Documents {
    /// Their number; 0: no retrieval.
    pub count: u32,
}

/// The chunks of a document that a request reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retrieval {
    /// The document.
    pub document: u32,
    /// Different chunks of it.
    pub chunks: Vec<u64>,
}

impl Documents {
    /// Blocks of a chunk.
    pub fn chunk_blocks(model: &KvModel) -> u64 {
        CHUNK_TOKENS.div_ceil(model.block_tokens)
    }

    /// Least and most tokens of a document.
    pub fn tokens(model: &KvModel) -> (u32, u32) {
        if model.layers >= LAYERS_OF_LARGE { (1024, 4096) } else { (4000, 12_000) }
    }

    /// Chunks of a document of 4,000 to 12,000 tokens, or 1,024 to 4,096 for large models.
    pub fn chunks(seed: u64, model: &KvModel, document: u32) -> u64 {
        let (least, most) = Self::tokens(model);
        let (least, most) = (u64::from(least), u64::from(most));
        let drawn = mix(mix(seed).wrapping_add(u64::from(document))) % (most - least + 1);
        (least + drawn).div_ceil(CHUNK_TOKENS)
    }

    /// Blocks of all documents.
    pub fn blocks(self, seed: u64, model: &KvModel) -> u64 {
        let chunks = (0..self.count).map(|document| Self::chunks(seed, model, document));
        chunks.sum::<u64>() * Self::chunk_blocks(model)
    }

    /// What the next request of a user reads: in one of ten, five chunks of one document, of which
    /// chunk `n` is drawn with a weight of `1 / n` (Zipf).
    pub(crate) fn retrieval(
        self,
        random: &mut SplitMix64,
        seed: u64,
        model: &KvModel,
    ) -> Option<Retrieval> {
        if self.count == 0 || random.unit() >= HAS_RETRIEVAL {
            return None;
        }
        let document = u32::try_from(random.below(u64::from(self.count))).unwrap_or(0);
        let mut left: Vec<u64> = (0..Self::chunks(seed, model, document)).collect();
        let mut chunks = Vec::with_capacity(CHUNKS_READ);
        while chunks.len() < CHUNKS_READ && !left.is_empty() {
            let weight = |chunk: &u64| 1.0 / (chunk + 1) as f64;
            let mut point = random.unit() * left.iter().map(weight).sum::<f64>();
            let drawn = left.iter().position(|chunk| {
                point -= weight(chunk);
                point < 0.0
            });
            chunks.push(left.remove(drawn.unwrap_or(left.len() - 1)));
        }
        Some(Retrieval { document, chunks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_the_requests_read_five_chunks_and_the_first_ones_most() {
        let model = KvModel::new("llama3.1-8b", 1).unwrap();
        let documents = Documents { count: 10 };
        let mut random = SplitMix64(7);
        let drawn: Vec<_> =
            (0..20_000).filter_map(|_| documents.retrieval(&mut random, 1, &model)).collect();
        let share = drawn.len() as f64 / 20_000.0;
        assert!((share - 0.1).abs() < 0.01, "{share}");
        let mut counts = [0; 5];
        for retrieval in &drawn {
            let count = Documents::chunks(1, &model, retrieval.document);
            let mut chunks = retrieval.chunks.clone();
            chunks.sort_unstable();
            chunks.dedup();
            assert_eq!(chunks.len(), CHUNKS_READ, "{retrieval:?}");
            assert!(chunks.iter().all(|chunk| *chunk < count));
            for chunk in chunks.into_iter().filter(|chunk| *chunk < 5) {
                counts[usize::try_from(chunk).unwrap()] += 1;
            }
        }
        assert!(counts.is_sorted_by(|one, next| one > next), "{counts:?}");
        assert_eq!(Documents::default().retrieval(&mut random, 1, &model), None);
    }

    #[test]
    fn documents_of_large_models_are_shorter() {
        for (name, least, most) in [("llama3.1-8b", 8, 24), ("llama3.1-70b-instruct", 2, 8)] {
            let model = KvModel::new(name, 1).unwrap();
            let all = (0..100).map(|document| Documents::chunks(3, &model, document));
            assert!(all.clone().all(|chunks| (least..=most).contains(&chunks)), "{name}");
            let blocks = all.sum::<u64>() * Documents::chunk_blocks(&model);
            assert_eq!(Documents { count: 100 }.blocks(3, &model), blocks);
        }
    }
}
