//! The methods of `GpuMemory` in Python: its facts, and submissions for several puts or views.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arguments::{of, type_error};
use crate::gpu::{LoadedBlocks, PyGpu, PyGpuEvent, PyGpuLoad, PyGpuMemory, PyGpuSave};
use crate::page_table::check_distinct;
use crate::store::{PyPreparedPut, start_gather};
use crate::view::PyViews;

#[pymethods]
impl PyGpuMemory {
    #[new]
    fn new(
        py: Python<'_>,
        gpu: &Bound<'_, PyGpu>,
        regions: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::pages)] pages: usize,
    ) -> PyResult<Self> {
        Self::open(py, gpu, regions, pages)
    }

    /// Bytes of a block: the sum of one page of each region.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.table().block_bytes()
    }

    /// Number of pages of each region.
    #[getter]
    fn pages(&self) -> usize {
        self.table().pages()
    }

    /// Number of regions.
    #[getter]
    fn regions(&self) -> usize {
        self.table().region_count()
    }

    /// Starts to copy pages of this memory into the blocks of several puts, in one submission:
    /// `puts` has pairs of a `PreparedPut` and its pages. Each put is sealed for itself.
    #[pyo3(signature = (puts, *, after))]
    fn start_gather(
        &self,
        py: Python<'_>,
        puts: &Bound<'_, PyAny>,
        after: &Bound<'_, PyGpuEvent>,
    ) -> PyResult<PyGpuSave> {
        let pairs = pairs(puts, "puts", "PreparedPut")?;
        let mut given = Vec::with_capacity(pairs.len());
        for (at, (put, pages)) in pairs.iter().enumerate() {
            let wrong = |_| type_error(format_args!("puts[{at}][0]"), put, "a PreparedPut");
            let put = put.cast::<PyPreparedPut>().map_err(wrong)?.get();
            given.push((put, put.pages_of(self.table(), pages)?));
        }
        start_gather(py, self, &given, after.get())
    }

    /// Starts to copy blocks of several views to pages of this memory, in one submission: `views`
    /// has pairs of `Views` and their pages. A page may occur once in all of them.
    #[pyo3(signature = (views, *, after, first = 0, count = None))]
    fn start_scatter(
        &self,
        py: Python<'_>,
        views: &Bound<'_, PyAny>,
        after: &Bound<'_, PyGpuEvent>,
        #[pyo3(from_py_with = of::first)] first: usize,
        #[pyo3(from_py_with = of::count)] count: Option<usize>,
    ) -> PyResult<PyGpuLoad> {
        let regions = self.table().region_range(first, count)?;
        let mut loaded = LoadedBlocks::default();
        for (at, (views, pages)) in pairs(views, "views", "Views")?.iter().enumerate() {
            let wrong = |_| type_error(format_args!("views[{at}][0]"), views, "Views");
            let views = views.cast::<PyViews>().map_err(wrong)?;
            views.try_borrow()?.add_to_load(self.table(), pages, &mut loaded)?;
        }
        check_distinct(loaded.blocks.iter().map(|(_, page)| *page).collect())?;
        self.start_load(py, loaded, regions, after)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a GpuMemory cannot be pickled; make one in each process"))
    }

    fn __repr__(&self) -> String {
        let (regions, pages, bytes) = (self.regions(), self.pages(), self.block_bytes());
        format!("<GpuMemory of {pages} pages in {regions} regions, {bytes} bytes per block>")
    }
}

/// Pairs of an object and its pages, from any iterable.
fn pairs<'py>(
    given: &Bound<'py, PyAny>,
    name: &str,
    what: &str,
) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
    let what = format!("an iterable of ({what}, pages)");
    let wrong = || type_error(name, given, &what);
    let items = given.try_iter().map_err(|_| wrong())?;
    items.map(|item| item?.extract().map_err(|_| wrong())).collect()
}
