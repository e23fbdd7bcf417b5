//! The paged KV cache of an engine: copies between its pages and blocks of the store. It keeps
//! pointers into Python's buffers, so the copies are unsafe code.
#![expect(unsafe_code, reason = "turns addresses in Python's buffers into slices of one page")]

use std::ops::Range;
use std::ptr::NonNull;
use std::slice;

use cascade_memory::{copy_in, copy_out};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;

use crate::arguments::{of, type_error};
use crate::buffers::Span;
use crate::page_table::{PageTable, RegionSpan};

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
    table: PageTable,
    /// The first page of each region.
    starts: Starts,
    /// Keeps the memory in place: Python refuses to resize or free an exported buffer.
    _held: Vec<PyUntypedBuffer>,
}

struct Starts(Vec<NonNull<u8>>);

// SAFETY: the pointers point into buffers that the `PyPagedMemory` around them keeps exported,
// which is memory without thread affinity.
unsafe impl Send for Starts {}
// SAFETY: as above. Pages are read and written through a shared reference; the class requires that
// its user never lets two threads do so with the same page at once.
unsafe impl Sync for Starts {}

#[pymethods]
impl PyPagedMemory {
    #[new]
    fn new(
        py: Python<'_>,
        regions: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::pages)] pages: usize,
    ) -> PyResult<Self> {
        let (mut held, mut starts) = (Vec::new(), Vec::new());
        let mut span_of = |at: usize, object: &Bound<'_, PyAny>| {
            let buffer = PyUntypedBuffer::get(object).map_err(|_| {
                type_error(format_args!("regions[{at}][0]"), object, "a writable buffer")
            })?;
            let span = Span::of(&buffer, format_args!("regions[{at}]"))?;
            if buffer.readonly() {
                let message = format!("regions[{at}] is read-only; give a writable buffer");
                return Err(PyBufferError::new_err(message));
            }
            held.push(buffer);
            starts.push(span.start());
            Ok(RegionSpan { address: span.start().addr().get(), bytes: span.bytes() })
        };
        let table = PageTable::new(py, regions, pages, "buffer", &mut span_of)?;
        for (region, start) in starts.iter_mut().enumerate() {
            let offset = table.start(region) - start.addr().get();
            // SAFETY: the first page of the region is in its buffer, as the table checked.
            *start = unsafe { start.add(offset) };
        }
        Ok(Self { table, starts: Starts(starts), _held: held })
    }

    /// Bytes of a block: the sum of one page of each region.
    #[getter]
    pub(crate) fn block_bytes(&self) -> usize {
        self.table.block_bytes()
    }

    /// Number of pages of each region.
    #[getter]
    fn pages(&self) -> usize {
        self.table.pages()
    }

    /// Number of regions.
    #[getter]
    fn regions(&self) -> usize {
        self.table.region_count()
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a PagedMemory cannot be pickled; make one in each process"))
    }

    fn __repr__(&self) -> String {
        let (regions, pages, bytes) = (self.regions(), self.pages(), self.block_bytes());
        format!("<PagedMemory of {pages} pages in {regions} regions, {bytes} bytes per block>")
    }
}

impl PyPagedMemory {
    /// The pages as a table.
    pub(crate) fn table(&self) -> &PageTable {
        &self.table
    }

    /// Copies a page of some regions to their positions in a block.
    ///
    /// # Panics
    /// If the page or a region does not exist, or the block has another length.
    pub(crate) fn gather(&self, block: &mut [u8], page: usize, regions: Range<usize>) {
        assert_eq!(block.len(), self.block_bytes(), "checked by the caller");
        for region in regions {
            let place = self.table.page_in_block(region);
            // SAFETY: the table checked that all pages are in the buffer, which `self` keeps
            // exported, so it is mapped and initialised. The class requires that no other thread
            // writes the page during this call.
            let bytes = unsafe { slice::from_raw_parts(self.page(region, page), place.len()) };
            copy_in(&mut block[place], bytes);
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
        assert_eq!(block.len(), self.block_bytes(), "checked by the caller");
        for region in regions {
            let place = self.table.page_in_block(region);
            let start = self.page(region, page);
            // SAFETY: as in `gather`. The buffer is writable and no other page shares the bytes
            // (both checked in `new`), and a call uses each page once. The class requires that no
            // other thread uses the page during this call.
            let bytes = unsafe { slice::from_raw_parts_mut(start, place.len()) };
            copy_out(bytes, &block[place], batch_bytes);
        }
    }

    /// The address of a page of a region.
    fn page(&self, region: usize, page: usize) -> *mut u8 {
        let offset = self.table.page_offset(region, page);
        // SAFETY: all pages are in the buffer of the region, as the table checked.
        unsafe { self.starts.0[region].add(offset) }.as_ptr()
    }
}

/// An engine's memory.
pub(crate) fn memory<'py>(given: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyPagedMemory>> {
    let memory = given.cast::<PyPagedMemory>();
    memory.cloned().map_err(|_| type_error("memory", given, "a PagedMemory"))
}
