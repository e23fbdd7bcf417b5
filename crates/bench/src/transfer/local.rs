//! Copies of a prompt's pages within this process: what local DRAM allows.

use cascade_memory::{HostSlabMut, HugePages, Pool, PoolConfig, copy_in};

use super::failed;
use super::prompt::{Geometry, Mapping};
use crate::figure::median;
use crate::{MeasureError, timed};

/// Layers that are copied, at most: their pages are far larger than the caches.
const LAYERS_MAX: u64 = 16;
/// Samples of each kind of copy before one is chosen.
const TRIALS: usize = 3;

/// Memory of this process with two sets of pages.
#[derive(Debug)]
pub(super) struct LocalPages {
    source: Vec<HostSlabMut>,
    target: Vec<HostSlabMut>,
    page_bytes: usize,
    is_streamed: bool,
    /// How the limit was measured.
    pub(super) text: String,
}

impl LocalPages {
    /// Allocates the pages, as regions are, and chooses the faster kind of copy.
    pub(super) fn allocate(geometry: &Geometry) -> Result<Self, MeasureError> {
        let regions = 2 * geometry.layers.min(LAYERS_MAX);
        let region_bytes = usize::try_from(geometry.region_bytes()).map_err(failed)?;
        let total = region_bytes * usize::try_from(2 * regions).map_err(failed)?;
        let config = PoolConfig {
            capacity_bytes: total + total / 8 + (64 << 20),
            huge_pages: HugePages::Auto,
            populate: true,
        };
        let pool = Pool::new(&config).map_err(failed)?;
        let slab = |_| {
            let slab = pool.allocate(region_bytes)?.into_host().ok();
            slab.map(|mut slab| {
                slab.fill(1);
                slab
            })
        };
        let slabs = || (0..regions).map(slab).collect::<Option<Vec<_>>>();
        let slabs = slabs().zip(slabs());
        let (source, target) = slabs.ok_or_else(|| failed("the pool is too small"))?;
        let page_bytes = usize::try_from(geometry.page_bytes).map_err(failed)?;
        let text = String::new();
        let mut pages = Self { source, target, page_bytes, is_streamed: false, text };
        let mapping = geometry.mapping(0, geometry.blocks);
        let mut rate = |is_streamed| {
            pages.is_streamed = is_streamed;
            let rates: Vec<_> = (0..TRIALS).map(|_| pages.rate(&mapping)).collect();
            median(&rates)
        };
        let (plain, streamed) = (rate(false), rate(true));
        pages.is_streamed = streamed > plain;
        let kind = if pages.is_streamed { "streaming stores" } else { "memcpy" };
        pages.text = format!(
            "copies of the same pages in the same order inside one process, {} layers of them, by \
             {kind}, the faster of memcpy and streaming stores; median of samples taken between \
             the rounds",
            regions / 2
        );
        Ok(pages)
    }

    /// The rate of one copy of all pages by one thread, in 10^9 bytes a second.
    pub(super) fn rate(&mut self, mapping: &Mapping) -> f64 {
        let (bytes, is_streamed) = (self.page_bytes, self.is_streamed);
        let at = |page: &u64| usize::try_from(*page).expect("an index") * bytes;
        let took = timed(|| {
            for (source, target) in self.source.iter().zip(&mut self.target) {
                for (from, to) in mapping.source.iter().zip(&mapping.target) {
                    let from = &source[at(from)..][..bytes];
                    let to = &mut target[at(to)..][..bytes];
                    if is_streamed { copy_in(to, from) } else { to.copy_from_slice(from) }
                }
            }
        });
        let copied = self.source.len() * mapping.source.len() * bytes;
        copied as f64 / took.as_secs_f64().max(1e-9) / 1e9
    }
}
