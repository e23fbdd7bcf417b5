//! An engine's KV cache as the store sees it: pages of its memory, gathered into blocks and
//! scattered from them. Holds pointers into Python's buffers, so its copies are unsafe inside.
#![expect(unsafe_code, reason = "turns places in Python's buffers into slices of one page each")]

use std::ops::Range;
use std::ptr::NonNull;
use std::slice;

use cascade_memory::{Strided, copy_in, copy_out};
use pyo3::buffer::{PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::arguments::{of, wrong};
use crate::buffers::Span;

/// Most regions of one memory: layers times a few.
const REGIONS_MAX: usize = 1 << 16;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyPagedMemory>()
}

/// An engine's KV cache as the store sees it: `regions` of equally many `pages`.
///
/// A region is a `(buffer, offset, stride, page_bytes)`: its page i is `page_bytes` bytes at
/// `offset + i * stride` of a C-contiguous, writable buffer. Block i is page i of each region, one
/// after the other in the given order. No two pages may share a byte. The buffers stay exported,
/// hence where they are, as long as this object lives.
///
/// While a call copies to or from a page, nobody else may write it, nor read one that is written:
/// this is the engine's to keep, as for any memory that it hands to another thread.
#[pyclass(name = "PagedMemory", module = "cascadekv", frozen)]
pub(crate) struct PyPagedMemory {
    regions: Vec<Region>,
    pages: usize,
    block_bytes: usize,
    /// Keeps the memory where it is: Python refuses to resize or free an exported buffer.
    _held: Vec<PyUntypedBuffer>,
}

/// The pages of one region, and where they lie in a block.
struct Region {
    /// The buffer's start plus the region's offset.
    start: NonNull<u8>,
    stride: usize,
    bytes: usize,
    offset_in_block: usize,
}

// SAFETY: `start` leads into a buffer that the `PyPagedMemory` around it keeps exported, which is
// memory without thread affinity; a region by itself calls nothing of Python's.
unsafe impl Send for Region {}
// SAFETY: as above. Through a shared reference pages are read and written; that no two threads do
// so at once with one page is what the class asks of its user.
unsafe impl Sync for Region {}

#[pymethods]
impl PyPagedMemory {
    #[new]
    fn new(
        regions: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::pages)] pages: usize,
    ) -> PyResult<Self> {
        if pages == 0 {
            return Err(PyValueError::new_err("pages: 0; a region has at least one page"));
        }
        let (mut held, mut known, mut block_bytes) = (Vec::new(), Vec::new(), 0_usize);
        let what = "an iterable of (buffer, offset, stride, page_bytes)";
        let items = regions.try_iter().map_err(|_| wrong("regions", regions, what))?;
        for (at, item) in items.enumerate() {
            if at == REGIONS_MAX {
                let told = format!("regions: more than {REGIONS_MAX}, the most of one memory");
                return Err(PyValueError::new_err(told));
            }
            let item = item?;
            let (object, offset, stride, bytes): (Bound<'_, PyAny>, usize, usize, usize) =
                item.extract().map_err(|_| {
                    let what = "a (buffer, offset, stride, page_bytes) of numbers from 0 up";
                    wrong(format_args!("regions[{at}]"), &item, what)
                })?;
            let buffer = PyUntypedBuffer::get(&object);
            let buffer = buffer.map_err(|_| {
                wrong(format_args!("regions[{at}][0]"), &object, "a writable buffer")
            })?;
            let place = Strided { start: offset, stride, bytes, count: pages };
            known.push(Region::new(&buffer, at, place, block_bytes)?);
            held.push(buffer);
            block_bytes = block_bytes.checked_add(bytes).ok_or_else(too_long)?;
        }
        if known.is_empty() {
            return Err(PyValueError::new_err("regions: empty; a block has at least one page"));
        }
        let memory = Self { regions: known, pages, block_bytes, _held: held };
        memory.check_disjoint()?;
        Ok(memory)
    }

    /// Bytes of one block: a page of each region.
    #[getter]
    pub(crate) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Pages of each region.
    #[getter]
    fn pages(&self) -> usize {
        self.pages
    }

    /// How many regions there are.
    #[getter]
    fn regions(&self) -> usize {
        self.regions.len()
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a PagedMemory cannot be pickled; make one in each process"))
    }

    fn __repr__(&self) -> String {
        let (regions, pages, bytes) = (self.regions.len(), self.pages, self.block_bytes);
        format!("<PagedMemory of {pages} pages in {regions} regions, {bytes} bytes a block>")
    }
}

impl Region {
    /// `place` counts from the start of the buffer.
    fn new(
        buffer: &PyUntypedBuffer,
        at: usize,
        place: Strided,
        offset_in_block: usize,
    ) -> PyResult<Self> {
        let Strided { start: offset, stride, bytes, .. } = place;
        let span = Span::of(buffer, format_args!("regions[{at}]"))?;
        if buffer.readonly() {
            return Err(PyBufferError::new_err(format!("regions[{at}] is read-only")));
        }
        if bytes == 0 || stride < bytes {
            return Err(PyValueError::new_err(format!(
                "regions[{at}] has pages of {bytes} bytes {stride} bytes apart; a page has at \
                 least one byte, and the stride is at least as long"
            )));
        }
        let end = place.extent().and_then(|extent| extent.checked_add(offset));
        if end.is_none_or(|end| end > span.bytes()) {
            return Err(PyValueError::new_err(format!(
                "regions[{at}] does not fit its buffer of {} bytes: {} pages of {bytes} bytes, \
                 {stride} apart, from offset {offset}",
                span.bytes(),
                place.count
            )));
        }
        // SAFETY: the offset and all pages behind it lie in the buffer, as just checked.
        let start = unsafe { span.start().add(offset) };
        Ok(Self { start, stride, bytes, offset_in_block })
    }

    /// The page's place in a block.
    fn in_block(&self) -> Range<usize> {
        self.offset_in_block..self.offset_in_block + self.bytes
    }
}

impl PyPagedMemory {
    /// Refuses pages that share bytes: two blocks could then not both be right.
    fn check_disjoint(&self) -> PyResult<()> {
        let place = |region: &Region| Strided {
            // Buffers may be views of one memory, so only addresses tell.
            start: region.start.addr().get(),
            stride: region.stride,
            bytes: region.bytes,
            count: self.pages,
        };
        for (at, region) in self.regions.iter().enumerate() {
            let shares = |other: &Region| place(region).shares_bytes_with(&place(other));
            if let Some(other) = self.regions[..at].iter().position(shares) {
                let told = format!("pages of regions[{other}] and regions[{at}] share memory");
                return Err(PyValueError::new_err(told));
            }
        }
        Ok(())
    }

    /// Numbers of pages, one for each of `count` blocks: an array of integers, or any iterable.
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
            let items = pages.try_iter().map_err(|_| wrong("pages", pages, what))?;
            // One more than there may be shows that there are too many.
            let numbers = items.take(count.saturating_add(1)).enumerate().map(|(at, item)| {
                let item = item?;
                let number = item.extract::<i64>();
                number.map_err(|_| wrong(format_args!("pages[{at}]"), &item, "a page's number"))
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
                let told = format!("pages[{at}]: {number}; pages are from 0 to {most}");
                PyValueError::new_err(told)
            })
        };
        numbers.into_iter().enumerate().map(number).collect()
    }

    /// The regions that a call names by its first one and how many; all from there by default.
    pub(crate) fn some_regions(
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
                    "first, count: regions from {first} on, {count} of them; there are {all}"
                )))
            }
        }
    }

    /// Where some regions lie in a block: pages of consecutive regions follow each other.
    pub(crate) fn in_block(&self, regions: &Range<usize>) -> Range<usize> {
        let start = |at: usize| {
            self.regions.get(at).map_or(self.block_bytes, |region| region.offset_in_block)
        };
        start(regions.start)..start(regions.end)
    }

    /// Copies pages of some regions to their places in a block.
    ///
    /// # Panics
    /// If there is no such page or region, or the block has another length.
    pub(crate) fn gather(&self, block: &mut [u8], page: usize, regions: Range<usize>) {
        assert!(page < self.pages && block.len() == self.block_bytes, "checked by the caller");
        for region in &self.regions[regions] {
            // SAFETY: `Region::new` checked that all pages lie in the buffer, which `self` keeps
            // exported, hence mapped and initialised; the engine writes the page only outside of
            // this call, as the class asks.
            let bytes = unsafe { slice::from_raw_parts(self.page(region, page), region.bytes) };
            copy_in(&mut block[region.in_block()], bytes);
        }
    }

    /// Copies pages of some regions from their places in a block. `batch_bytes` is what the whole
    /// call copies.
    ///
    /// # Panics
    /// If there is no such page or region, or the block has another length.
    pub(crate) fn scatter(
        &self,
        block: &[u8],
        page: usize,
        regions: Range<usize>,
        batch_bytes: usize,
    ) {
        assert!(page < self.pages && block.len() == self.block_bytes, "checked by the caller");
        for region in &self.regions[regions] {
            let start = self.page(region, page);
            // SAFETY: as in `gather`; the buffer is writable, no other page shares the bytes (both
            // checked in `new`), a call names each page once, and nobody else uses the page during
            // the call, as the class asks.
            let bytes = unsafe { slice::from_raw_parts_mut(start, region.bytes) };
            copy_out(bytes, &block[region.in_block()], batch_bytes);
        }
    }

    /// Where a page of one of the regions starts.
    fn page(&self, region: &Region, page: usize) -> *mut u8 {
        debug_assert!(page < self.pages, "checked by the caller");
        // SAFETY: the page is one of `pages`, all of which lie in the buffer of the region.
        unsafe { region.start.add(page * region.stride) }.as_ptr()
    }
}

fn too_long() -> PyErr {
    PyValueError::new_err("a block of these regions is longer than memory")
}
