//! The pages of an engine's memory as a table: the regions, their strides, and where each page is
//! in a block. It knows addresses as numbers only.

use std::ops::Range;

use cascade_memory::StridedPages;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments::type_error;

/// Limit of the regions of one memory; usual are a few per layer.
const REGIONS_MAX: usize = 1 << 16;

/// Regions with the same number of pages each. A block is page i of each region, one after the
/// other.
pub(crate) struct PageTable {
    regions: Vec<TableRegion>,
    pages: usize,
    block_bytes: usize,
}

/// One region, and its position in a block.
struct TableRegion {
    pages: StridedPages,
    offset_in_block: usize,
}

/// One region as Python gives it: `(object, offset, stride, page_bytes)`.
pub(crate) struct GivenRegion<'py> {
    pub(crate) object: Bound<'py, PyAny>,
    pub(crate) offset: usize,
    pub(crate) stride: usize,
    pub(crate) bytes: usize,
}

/// Where the memory of a region is, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionSpan {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
}

impl PageTable {
    /// The table of all regions. `span_of` finds the memory of a region, by its index.
    pub(crate) fn new<'py>(
        py: Python<'py>,
        regions: &Bound<'py, PyAny>,
        pages: usize,
        object: &str,
        mut span_of: impl FnMut(usize, &Bound<'py, PyAny>) -> PyResult<RegionSpan>,
    ) -> PyResult<Self> {
        if pages == 0 {
            return Err(PyValueError::new_err("pages: 0; a region has at least one page"));
        }
        let mut table = Self { regions: Vec::new(), pages, block_bytes: 0 };
        let what = format!("an iterable of ({object}, offset, stride, page_bytes)");
        let items = regions.try_iter().map_err(|_| type_error("regions", regions, &what))?;
        for (at, item) in items.enumerate() {
            if at == REGIONS_MAX {
                let message = format!("regions: more than {REGIONS_MAX}, the limit of one memory");
                return Err(PyValueError::new_err(message));
            }
            let given = GivenRegion::of(at, &item?, object)?;
            let span = span_of(at, &given.object)?;
            table.add(at, &given, &span)?;
        }
        if table.regions.is_empty() {
            return Err(PyValueError::new_err("regions: empty; a block has at least one page"));
        }
        // Detached: the time grows with the square of the number of regions.
        py.detach(|| table.check_disjoint())?;
        Ok(table)
    }

    fn add(&mut self, at: usize, given: &GivenRegion<'_>, span: &RegionSpan) -> PyResult<()> {
        let GivenRegion { offset, stride, bytes, .. } = *given;
        if bytes == 0 || stride < bytes {
            return Err(PyValueError::new_err(format!(
                "regions[{at}] has pages of {bytes} bytes and a stride of {stride} bytes; a page \
                 has at least one byte, and the stride must not be smaller than a page"
            )));
        }
        let mut pages = StridedPages { start: offset, stride, bytes, count: self.pages };
        let end = pages.extent().and_then(|extent| extent.checked_add(offset));
        if end.is_none_or(|end| end > span.bytes) {
            return Err(PyValueError::new_err(format!(
                "regions[{at}] does not fit its buffer of {} bytes: {} pages of {bytes} bytes with \
                 a stride of {stride}, from offset {offset}",
                span.bytes, self.pages
            )));
        }
        pages.start = span.address.checked_add(offset).ok_or_else(too_long)?;
        self.regions.push(TableRegion { pages, offset_in_block: self.block_bytes });
        self.block_bytes = self.block_bytes.checked_add(bytes).ok_or_else(too_long)?;
        Ok(())
    }

    /// Refuses pages that share bytes, because a copy to one would damage the other. Two objects
    /// may be views of the same memory, so addresses are compared.
    fn check_disjoint(&self) -> PyResult<()> {
        for (at, region) in self.regions.iter().enumerate() {
            let shares = |other: &TableRegion| region.pages.overlaps(&other.pages);
            if let Some(other) = self.regions[..at].iter().position(shares) {
                let message = format!("pages of regions[{other}] and regions[{at}] share memory");
                return Err(PyValueError::new_err(message));
            }
        }
        Ok(())
    }

    /// Bytes of a block: the sum of one page of each region.
    pub(crate) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Number of pages of each region.
    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// Number of regions.
    pub(crate) fn region_count(&self) -> usize {
        self.regions.len()
    }

    /// Where a page is in its region, in bytes from the region's first page.
    ///
    /// # Panics
    /// If the page or the region does not exist.
    pub(crate) fn page_offset(&self, region: usize, page: usize) -> usize {
        assert!(page < self.pages, "checked by the caller");
        page * self.regions[region].pages.stride
    }

    /// The address of a region's first page.
    pub(crate) fn start(&self, region: usize) -> usize {
        self.regions[region].pages.start
    }

    /// The position of a page of a region in a block.
    ///
    /// # Panics
    /// If the region does not exist.
    pub(crate) fn page_in_block(&self, region: usize) -> Range<usize> {
        let region = &self.regions[region];
        region.offset_in_block..region.offset_in_block + region.pages.bytes
    }

    /// The page number of each of `count` blocks, from an array of integers or any iterable.
    pub(crate) fn page_numbers(
        &self,
        pages: &Bound<'_, PyAny>,
        count: usize,
    ) -> PyResult<Vec<usize>> {
        let numbers: Vec<i64> = if let Ok(array) = PyBuffer::<i64>::get(pages) {
            array.to_vec(pages.py())?
        } else if let Ok(array) = PyBuffer::<i32>::get(pages) {
            array.to_vec(pages.py())?.into_iter().map(i64::from).collect()
        } else {
            let what = "numbers of pages: an array of integers or an iterable of int";
            let items = pages.try_iter().map_err(|_| type_error("pages", pages, what))?;
            // The iterable may be infinite: one number more than `count` shows that it is too long.
            let numbers = items.take(count.saturating_add(1)).enumerate().map(|(at, item)| {
                let item = item?;
                let number = item.extract::<i64>();
                number
                    .map_err(|_| type_error(format_args!("pages[{at}]"), &item, "a page's number"))
            });
            numbers.collect::<PyResult<_>>()?
        };
        if numbers.len() != count {
            let got = match numbers.len() {
                more if more > count => format!("more than {count}"),
                fewer => fewer.to_string(),
            };
            return Err(PyValueError::new_err(format!("pages: {count} blocks but {got} pages")));
        }
        let number = |(at, number): (usize, i64)| {
            usize::try_from(number).ok().filter(|number| *number < self.pages).ok_or_else(|| {
                let most = self.pages - 1;
                let message = format!("pages[{at}]: {number}; pages are from 0 to {most}");
                PyValueError::new_err(message)
            })
        };
        numbers.into_iter().enumerate().map(number).collect()
    }

    /// The range of `count` regions from `first` on; by default all from `first` on.
    pub(crate) fn region_range(
        &self,
        first: usize,
        count: Option<usize>,
    ) -> PyResult<Range<usize>> {
        let all = self.regions.len();
        let end = count.map_or(Some(all), |count| first.checked_add(count));
        match end {
            Some(end) if first <= end && end <= all => Ok(first..end),
            _ => {
                let count = count.map_or_else(|| "all".to_owned(), |count| count.to_string());
                Err(PyValueError::new_err(format!(
                    "first, count: {count} regions from {first} on; the memory has {all}"
                )))
            }
        }
    }

    /// The position of a range of regions in a block. Their pages follow each other.
    pub(crate) fn in_block(&self, regions: &Range<usize>) -> Range<usize> {
        let start = |at: usize| {
            self.regions.get(at).map_or(self.block_bytes, |region| region.offset_in_block)
        };
        start(regions.start)..start(regions.end)
    }

    /// As [`Self::page_numbers`], of which none may occur twice: a page takes one block.
    pub(crate) fn target_pages(
        &self,
        pages: &Bound<'_, PyAny>,
        count: usize,
    ) -> PyResult<Vec<usize>> {
        let pages = self.page_numbers(pages, count)?;
        check_distinct(pages.clone())?;
        Ok(pages)
    }

    /// Refuses blocks of another length than the memory's.
    pub(crate) fn check_block_bytes(&self, bytes: usize) -> PyResult<()> {
        if self.block_bytes == bytes {
            return Ok(());
        }
        Err(PyValueError::new_err(format!(
            "memory: its blocks have {} bytes, but the prepared blocks have {bytes}",
            self.block_bytes
        )))
    }
}

/// Refuses a page that occurs twice.
pub(crate) fn check_distinct(mut pages: Vec<usize>) -> PyResult<()> {
    pages.sort_unstable();
    if let Some([twice, ..]) = pages.windows(2).find(|pair| pair[0] == pair[1]) {
        let message = format!("pages: {twice} occurs twice; a page takes one block");
        return Err(PyValueError::new_err(message));
    }
    Ok(())
}

impl<'py> GivenRegion<'py> {
    fn of(at: usize, item: &Bound<'py, PyAny>, object: &str) -> PyResult<Self> {
        let given = item.extract::<(Bound<'_, PyAny>, usize, usize, usize)>();
        let (object, offset, stride, bytes) = given.map_err(|_| {
            let what = format!("a ({object}, offset, stride, page_bytes) of numbers from 0 up");
            type_error(format_args!("regions[{at}]"), item, &what)
        })?;
        Ok(Self { object, offset, stride, bytes })
    }
}

fn too_long() -> PyErr {
    PyValueError::new_err("regions: the pages of a block exceed the address space")
}
