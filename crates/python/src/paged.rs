//! The paged KV cache of an engine: copies between its pages and blocks of the store. It keeps
//! pointers into Python's buffers, so the copies are unsafe code.
#![expect(unsafe_code, reason = "turns addresses in Python's buffers into slices of one page")]

use std::ops::Range;
use std::ptr::NonNull;
use std::slice;

use cascade_memory::{StridedPages, copy_in, copy_out};
use pyo3::buffer::{PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::arguments::{of, type_error};
use crate::buffers::Span;

/// Limit of the regions of one memory; usual are a few per layer.
const REGIONS_MAX: usize = 1 << 16;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyPagedMemory>()
}

/// The paged KV cache of an engine: `regions` with the same number of `pages` each.
///
/// A region is a tuple `(buffer, offset, stride, page_bytes)`. Its page i has `page_bytes` bytes at
/// `offset + i * stride` of a C-contiguous, writable buffer. A block consists of the same page of
/// all regions, one after the other in the given order. No two pages may share a byte. The buffers
/// stay exported, so that they cannot move, as long as this object lives.
///
/// While a call copies from a page, no other thread may write it. While a call copies to a page, no
/// other thread may read or write it. The engine must ensure both.
#[pyclass(name = "PagedMemory", module = "cascadekv", frozen)]
pub(crate) struct PyPagedMemory {
    regions: Vec<Region>,
    pages: usize,
    block_bytes: usize,
    /// Keeps the memory in place: Python refuses to resize or free an exported buffer.
    _held: Vec<PyUntypedBuffer>,
}

/// The pages of one region, and their position in a block.
struct Region {
    /// The start of the buffer plus the offset of the region.
    start: NonNull<u8>,
    stride: usize,
    bytes: usize,
    offset_in_block: usize,
}

// SAFETY: `start` points into a buffer that the `PyPagedMemory` around it keeps exported, which is
// memory without thread affinity. A region does not call Python.
unsafe impl Send for Region {}
// SAFETY: as above. Pages are read and written through a shared reference; the class requires that
// its user never lets two threads do so with the same page at once.
unsafe impl Sync for Region {}

#[pymethods]
impl PyPagedMemory {
    #[new]
    fn new(
        py: Python<'_>,
        regions: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::pages)] pages: usize,
    ) -> PyResult<Self> {
        if pages == 0 {
            return Err(PyValueError::new_err("pages: 0; a region has at least one page"));
        }
        let (mut held, mut checked, mut block_bytes) = (Vec::new(), Vec::new(), 0_usize);
        let what = "an iterable of (buffer, offset, stride, page_bytes)";
        let items = regions.try_iter().map_err(|_| type_error("regions", regions, what))?;
        for (at, item) in items.enumerate() {
            if at == REGIONS_MAX {
                let message = format!("regions: more than {REGIONS_MAX}, the limit of one memory");
                return Err(PyValueError::new_err(message));
            }
            let item = item?;
            let (object, offset, stride, bytes): (Bound<'_, PyAny>, usize, usize, usize) =
                item.extract().map_err(|_| {
                    let what = "a (buffer, offset, stride, page_bytes) of numbers from 0 up";
                    type_error(format_args!("regions[{at}]"), &item, what)
                })?;
            let buffer = PyUntypedBuffer::get(&object);
            let buffer = buffer.map_err(|_| {
                type_error(format_args!("regions[{at}][0]"), &object, "a writable buffer")
            })?;
            let place = StridedPages { start: offset, stride, bytes, count: pages };
            checked.push(Region::new(&buffer, at, place, block_bytes)?);
            held.push(buffer);
            block_bytes = block_bytes.checked_add(bytes).ok_or_else(too_long)?;
        }
        if checked.is_empty() {
            return Err(PyValueError::new_err("regions: empty; a block has at least one page"));
        }
        // Detached: the time grows with the square of the number of regions.
        py.detach(|| check_disjoint(&checked, pages))?;
        Ok(Self { regions: checked, pages, block_bytes, _held: held })
    }

    /// Bytes of a block: the sum of one page of each region.
    #[getter]
    pub(crate) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Number of pages of each region.
    #[getter]
    fn pages(&self) -> usize {
        self.pages
    }

    /// Number of regions.
    #[getter]
    fn regions(&self) -> usize {
        self.regions.len()
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a PagedMemory cannot be pickled; make one in each process"))
    }

    fn __repr__(&self) -> String {
        let (regions, pages, bytes) = (self.regions.len(), self.pages, self.block_bytes);
        format!("<PagedMemory of {pages} pages in {regions} regions, {bytes} bytes per block>")
    }
}

impl Region {
    /// A region of a buffer; `place.start` is its offset in the buffer.
    fn new(
        buffer: &PyUntypedBuffer,
        at: usize,
        place: StridedPages,
        offset_in_block: usize,
    ) -> PyResult<Self> {
        let StridedPages { start: offset, stride, bytes, .. } = place;
        let span = Span::of(buffer, format_args!("regions[{at}]"))?;
        if buffer.readonly() {
            let message = format!("regions[{at}] is read-only; give a writable buffer");
            return Err(PyBufferError::new_err(message));
        }
        if bytes == 0 || stride < bytes {
            return Err(PyValueError::new_err(format!(
                "regions[{at}] has pages of {bytes} bytes and a stride of {stride} bytes; a page \
                 has at least one byte, and the stride must not be smaller than a page"
            )));
        }
        let end = place.extent().and_then(|extent| extent.checked_add(offset));
        if end.is_none_or(|end| end > span.bytes()) {
            return Err(PyValueError::new_err(format!(
                "regions[{at}] does not fit its buffer of {} bytes: {} pages of {bytes} bytes with \
                 a stride of {stride}, from offset {offset}",
                span.bytes(),
                place.count
            )));
        }
        // SAFETY: the offset and all pages after it are in the buffer, as just checked.
        let start = unsafe { span.start().add(offset) };
        Ok(Self { start, stride, bytes, offset_in_block })
    }

    /// The position of a page of this region in a block.
    fn in_block(&self) -> Range<usize> {
        self.offset_in_block..self.offset_in_block + self.bytes
    }
}

/// Refuses pages that share bytes, because a copy to one would damage the other.
fn check_disjoint(regions: &[Region], pages: usize) -> PyResult<()> {
    let place = |region: &Region| StridedPages {
        // Two buffers may be views of the same memory, so addresses are compared.
        start: region.start.addr().get(),
        stride: region.stride,
        bytes: region.bytes,
        count: pages,
    };
    for (at, region) in regions.iter().enumerate() {
        let shares = |other: &Region| place(region).overlaps(&place(other));
        if let Some(other) = regions[..at].iter().position(shares) {
            let message = format!("pages of regions[{other}] and regions[{at}] share memory");
            return Err(PyValueError::new_err(message));
        }
    }
    Ok(())
}

impl PyPagedMemory {
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

    /// Copies a page of some regions to their positions in a block.
    ///
    /// # Panics
    /// If the page or a region does not exist, or the block has another length.
    pub(crate) fn gather(&self, block: &mut [u8], page: usize, regions: Range<usize>) {
        assert!(page < self.pages && block.len() == self.block_bytes, "checked by the caller");
        for region in &self.regions[regions] {
            // SAFETY: `Region::new` checked that all pages are in the buffer, which `self` keeps
            // exported, so it is mapped and initialised. The class requires that no other thread
            // writes the page during this call.
            let bytes = unsafe { slice::from_raw_parts(self.page(region, page), region.bytes) };
            copy_in(&mut block[region.in_block()], bytes);
        }
    }

    /// Copies a page of some regions from their positions in a block. `batch_bytes` is the total of
    /// the whole call, which decides whether the copies are streamed.
    ///
    /// # Panics
    /// If the page or a region does not exist, or the block has another length.
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
            // SAFETY: as in `gather`. The buffer is writable and no other page shares the bytes
            // (both checked in `new`), and a call uses each page once. The class requires that no
            // other thread uses the page during this call.
            let bytes = unsafe { slice::from_raw_parts_mut(start, region.bytes) };
            copy_out(bytes, &block[region.in_block()], batch_bytes);
        }
    }

    /// The address of a page of a region.
    fn page(&self, region: &Region, page: usize) -> *mut u8 {
        debug_assert!(page < self.pages, "checked by the caller");
        // SAFETY: all `pages` pages are in the buffer of the region.
        unsafe { region.start.add(page * region.stride) }.as_ptr()
    }
}

fn too_long() -> PyErr {
    PyValueError::new_err("regions: the pages of a block exceed the address space")
}

/// An engine's memory.
pub(crate) fn memory<'py>(given: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyPagedMemory>> {
    let memory = given.cast::<PyPagedMemory>();
    memory.cloned().map_err(|_| type_error("memory", given, "a PagedMemory"))
}
