//! The paged KV of one process: its endpoint and regions, filled and compared.

use cascade_transport::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Piece, Place, Region, RegionId,
    Ticket,
};

use super::failed;
use super::prompt::{Expected, Geometry, Mapping};
use crate::backend::soon;
use crate::{MeasureError, pattern};

/// The paged KV of one process.
#[derive(Debug)]
pub(super) struct Pages {
    pub(super) endpoint: Endpoint,
    pub(super) geometry: Geometry,
    /// Keys and values of the first layer, of the second, and so on.
    regions: Vec<RegionId>,
    expected: Expected,
}

/// What a comparison found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Compared {
    pub(super) pages: u64,
    pub(super) wrong: u64,
}

impl Pages {
    /// Allocates and registers all regions.
    pub(super) fn allocate(name: &str, geometry: Geometry) -> Result<Self, MeasureError> {
        let config = EndpointConfig { name: name.to_owned(), ..Default::default() };
        let endpoint = Endpoint::new(config).map_err(failed)?;
        let bytes = usize::try_from(geometry.region_bytes()).map_err(failed)?;
        let register = |_| {
            let region = Region::shared(bytes, Access::BOTH).map_err(failed)?;
            endpoint.register(region).map_err(failed)
        };
        let regions = (0..geometry.regions()).map(register).collect::<Result<_, _>>()?;
        Ok(Self { endpoint, geometry, regions, expected: Expected::nothing(&geometry) })
    }

    /// Writes the bytes of a process that sends.
    pub(super) fn fill_to_send(&self) -> Result<(), MeasureError> {
        let geometry = self.geometry;
        for region in 0..geometry.regions() {
            let pages = 0..geometry.pool_pages();
            self.fill_region(region, pages.map(|page| geometry.pattern_offset(region, page)))?;
        }
        Ok(())
    }

    /// Writes the bytes of a process that receives: those of no page that is sent.
    pub(super) fn fill_to_receive(&mut self) -> Result<(), MeasureError> {
        self.expected = Expected::nothing(&self.geometry);
        for region in 0..self.geometry.regions() {
            self.fill_region(region, self.expected.pattern_offsets(&self.geometry, region))?;
        }
        Ok(())
    }

    /// Writes all pages of a region, whose bytes begin at these places in the pattern.
    fn fill_region(
        &self,
        region: u64,
        offsets: impl Iterator<Item = u64>,
    ) -> Result<(), MeasureError> {
        let mut buffer = vec![0; usize::try_from(self.geometry.page_bytes).map_err(failed)?];
        for (offset, page) in offsets.zip(0..) {
            pattern::fill(offset, &mut buffer);
            let at = page * self.geometry.page_bytes;
            self.endpoint.fill(self.region(region), at, &buffer).map_err(failed)?;
        }
        Ok(())
    }

    fn region(&self, index: u64) -> RegionId {
        self.regions[usize::try_from(index).expect("an index")]
    }

    /// Compares every byte of every page with what arrived in this round and before.
    pub(super) fn compare(&mut self, round: &Mapping) -> Result<Compared, MeasureError> {
        self.expected.arrive(round);
        let page_bytes = usize::try_from(self.geometry.page_bytes).map_err(failed)?;
        let (mut expected, mut actual) = (vec![0; page_bytes], vec![0; page_bytes]);
        let mut compared = Compared { pages: 0, wrong: 0 };
        for region in 0..self.geometry.regions() {
            let offsets = self.expected.pattern_offsets(&self.geometry, region);
            for (offset, page) in offsets.zip(0..) {
                pattern::fill(offset, &mut expected);
                let at = page * self.geometry.page_bytes;
                self.endpoint.fetch(self.region(region), at, &mut actual).map_err(failed)?;
                compared.pages += 1;
                compared.wrong += u64::from(actual != expected);
            }
        }
        Ok(compared)
    }

    /// The pieces of each layer: keys and values of all blocks. `remote` are the regions of the
    /// peer; a write sends from `source`, a read receives into `target`.
    pub(super) fn layers(
        &self,
        remote: &[RegionId],
        mapping: &Mapping,
        direction: Direction,
    ) -> Vec<Vec<Piece>> {
        let bytes = self.geometry.page_bytes;
        let (here, there) = match direction {
            Direction::Write => (&mapping.source, &mapping.target),
            Direction::Read => (&mapping.target, &mapping.source),
        };
        let pieces = |(local, remote): (&RegionId, &RegionId)| {
            let place =
                |region: &RegionId, page: &u64| Place { region: *region, offset: page * bytes };
            let pairs = here.iter().zip(there);
            let piece = |(here, there)| Piece {
                local: place(local, here),
                remote: place(remote, there),
                bytes,
            };
            pairs.map(piece).collect::<Vec<_>>()
        };
        let regions: Vec<_> = self.regions.iter().zip(remote).map(pieces).collect();
        regions.chunks(2).map(<[Vec<Piece>]>::concat).collect()
    }
}

/// Posts one layer.
pub(super) fn post(
    connection: &dyn Connection,
    direction: Direction,
    pieces: &[Piece],
    notice: Option<&[u8]>,
) -> Result<Ticket, MeasureError> {
    connection.post(&Batch { direction, pieces, notice }, soon()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Backend, listen};
    use crate::child::SocketDirectory;

    #[test]
    fn pages_that_did_not_arrive_and_pages_that_changed_are_found() {
        let geometry = Geometry { layers: 2, blocks: 9, page_bytes: 4096 };
        for (backend, round) in Backend::PLAIN.into_iter().zip(1..) {
            let source = Pages::allocate("source", geometry).unwrap();
            let mut target = Pages::allocate("target", geometry).unwrap();
            source.fill_to_send().unwrap();
            target.fill_to_receive().unwrap();
            let directory = SocketDirectory::make().unwrap();
            let unix = directory.path().join("t");
            let (_listeners, addresses) = listen(&target.endpoint, unix).unwrap();
            let connection = backend.connect(&source.endpoint, &addresses).unwrap();
            let remote: Vec<_> = connection.peer().regions.iter().map(|it| it.id).collect();
            let mapping = geometry.mapping(round, 9);
            let layers = source.layers(&remote, &mapping, Direction::Write);
            let write = |layer: usize| {
                let posted = post(&*connection, Direction::Write, &layers[layer], None);
                posted.unwrap().wait(soon()).unwrap();
            };
            write(0);
            let missing = target.compare(&mapping).unwrap();
            assert_eq!(missing, Compared { pages: 4 * 11, wrong: 18 }, "the second layer");
            write(1);
            assert_eq!(target.compare(&mapping).unwrap().wrong, 0);

            // A byte of a page that nothing was written to.
            let spare = (0..11).find(|page| !mapping.target.contains(page)).unwrap();
            let (region, at, mut byte) = (target.region(3), spare * 4096 + 4095, [0]);
            target.endpoint.fetch(region, at, &mut byte).unwrap();
            target.endpoint.fill(region, at, &[byte[0] ^ 1]).unwrap();
            assert_eq!(target.compare(&mapping).unwrap().wrong, 1);
            target.endpoint.fill(region, at, &byte).unwrap();
        }
    }
}
