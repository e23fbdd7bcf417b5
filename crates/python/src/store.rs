//! The store in Python: calls with batches, a result for each block, detached while they wait.

mod prepared;
mod put_keywords;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, NamespaceId};
use cascade_runtime::SystemClock;
use cascade_store::{
    BlockStore, CallOptions, Put, PutSlab, Request, Store, StoreConfig, StoreError, StoreStats,
};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

use crate::arguments::{self, of, type_error};
use crate::buffers::{PyReservation, Sources, Targets};
use crate::changes::{PyChanges, cursor};
use crate::config::store_config;
use crate::errors::{ConfigError, to_python};
use crate::hints::hints;
use crate::keys::Keys;
use crate::namespace::{PyNamespace, namespace_id};
use crate::process_bound::ProcessBound;
use crate::results::{PyGetResult, PyPrefixMatch, PyPutResult, tier_name};
use crate::stages::Stages;
use crate::stats;
use crate::text_keys::CallKeys;
use crate::view::PyViews;

pub(crate) use prepared::{PyPreparedPut, start_gather};
use put_keywords::{PutKeywords, parents, reserved};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyStore>()?;
    prepared::register(module)
}

static STORE_CONFIG: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// A block store with tiers in memory and files.
///
/// Pass the settings of `StoreConfig` as keywords, or a `StoreConfig`. `stages` is a dict of names
/// in the pipeline and Python stages (`cascadekv.stages`). Methods take batches, return a result
/// for each block in order, and can be called from any thread. A context manager.
#[pyclass(name = "Store", module = "cascadekv", frozen)]
#[derive(Debug)]
pub(crate) struct PyStore {
    state: ProcessBound<Mutex<StoreState>>,
    /// The configuration of an embedded store; none for a served one.
    config: Option<Py<PyAny>>,
    /// The pipeline of an embedded store, or the socket of a node.
    place: String,
}

/// A closed store has no open files and no memory, only its last statistics.
#[derive(Debug, Clone)]
enum StoreState {
    Open(Arc<dyn BlockStore>),
    Closed(Box<StoreStats>),
}

#[pymethods]
impl PyStore {
    #[new]
    #[pyo3(signature = (config = None, *, stages = None, **settings))]
    fn new(
        py: Python<'_>,
        config: Option<Bound<'_, PyAny>>,
        stages: Option<Bound<'_, PyAny>>,
        settings: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let class = STORE_CONFIG.import(py, "cascadekv.config", "StoreConfig")?;
        let config = match (config, settings) {
            (Some(_), Some(_)) => {
                return Err(PyTypeError::new_err(
                    "pass a StoreConfig or keywords, not both; to change a configuration, use \
                     dataclasses.replace",
                ));
            }
            (Some(config), None) if config.is_instance(class)? => config,
            (Some(config), None) => {
                let what = "a StoreConfig; pass a dict of settings as Store(**settings)";
                return Err(type_error("config", &config, what));
            }
            (None, settings) => {
                let settings = settings.unwrap_or_else(|| PyDict::new(py));
                class.call_method1("from_dict", (settings,))?
            }
        };
        let settings = store_config(&config)?;
        refuse_file_as_directory(&settings)?;
        let stages = Stages::new(stages.as_ref(), &settings)?;
        let opened =
            py.detach(|| Store::open_with(settings, stages.registry(), Arc::new(SystemClock)));
        let store: Arc<dyn BlockStore> = match opened {
            Ok(store) => Arc::new(store),
            Err(error) => {
                stages.end();
                return Err(to_python(&error));
            }
        };
        stages.set_store(&store);
        let place = config.getattr("pipeline")?.to_string();
        let state = ProcessBound::new(Mutex::new(StoreState::Open(store)));
        Ok(Self { state, config: Some(config.unbind()), place })
    }

    /// The configuration of an embedded store; `None` for a served one.
    #[getter]
    fn config(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.config.as_ref().map(|config| config.clone_ref(py))
    }

    /// Stores blocks. Returns a `PutResult` for each, or the one of a text key.
    ///
    /// `blocks` is a buffer for each key, or one buffer with all blocks in equal pieces. Do not
    /// change them until the call returns. The keys of a call are consecutive blocks of one chain
    /// after the block `parent`, unless `chain` is false. `ttl` and `timeout` are durations:
    /// seconds, text such as `"5s"`, or a `timedelta`. A text key raises the error of a put that
    /// failed, and `ConflictError` if it is stored with other bytes.
    #[pyo3(signature = (
        keys, blocks, *, parent = None, chain = true, is_prefix = false, last_is_partial = false,
        ttl = None, namespace = None, timeout = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn put<'py>(
        &self,
        py: Python<'py>,
        keys: CallKeys,
        blocks: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = of::chain)] chain: bool,
        #[pyo3(from_py_with = of::is_prefix)] is_prefix: bool,
        #[pyo3(from_py_with = of::last_is_partial)] last_is_partial: bool,
        #[pyo3(from_py_with = of::ttl)] ttl: Option<u64>,
        #[pyo3(from_py_with = namespace_id)] namespace: Option<NamespaceId>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let parents = parents(&keys, parent, chain)?;
        let namespace = keys.namespace(namespace, parent.is_some() || last_is_partial)?;
        let keywords = PutKeywords { parents, namespace, is_prefix, last_is_partial, ttl_ms: ttl };
        let options = options(timeout);
        let sources = Sources::new(blocks, keys.len())?;
        let store = self.store()?;
        let outcomes = py.detach(|| {
            let puts: Vec<Put<'_>> = sources
                .slices()
                .into_iter()
                .enumerate()
                .map(|(at, bytes)| keywords.put(at, keys[at], bytes, keys.len()))
                .collect();
            store.put(&puts, options)
        });
        keys.check_put(&outcomes)?;
        keys.results(py, PyPutResult::all(py, outcomes)?)
    }

    /// Reserves memory of the pool for a block of `size` bytes, to write it in place and then put
    /// it with `put_reserved`.
    #[pyo3(signature = (size, *, timeout = None))]
    fn reserve(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::size)] size: usize,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<PyReservation> {
        let options = options(timeout);
        let store = self.store()?;
        let slab = py.detach(|| store.reserve(size, options)).map_err(|error| to_python(&error))?;
        Ok(PyReservation::new(slab))
    }

    /// Stores blocks that were written in place, without a copy. The keywords are those of `put`.
    ///
    /// Release all arrays and memoryviews of the reservations first.
    #[pyo3(signature = (
        keys, reservations, *, parent = None, chain = true, is_prefix = false,
        last_is_partial = false, ttl = None, namespace = None, timeout = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn put_reserved(
        &self,
        py: Python<'_>,
        keys: Keys,
        #[pyo3(from_py_with = reserved)] reservations: Vec<Bound<'_, PyReservation>>,
        parent: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = of::chain)] chain: bool,
        #[pyo3(from_py_with = of::is_prefix)] is_prefix: bool,
        #[pyo3(from_py_with = of::last_is_partial)] last_is_partial: bool,
        #[pyo3(from_py_with = of::ttl)] ttl: Option<u64>,
        #[pyo3(from_py_with = namespace_id)] namespace: Option<NamespaceId>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<Vec<Py<PyPutResult>>> {
        if reservations.len() != keys.len() {
            let (keys, got) = (keys.len(), reservations.len());
            let message = format!("reservations: {keys} keys but {got} reservations");
            return Err(PyValueError::new_err(message));
        }
        let parents = parents(&keys, parent, chain)?;
        let namespace = namespace.unwrap_or_default();
        let keywords = PutKeywords { parents, namespace, is_prefix, last_is_partial, ttl_ms: ttl };
        let options = options(timeout);
        let store = self.store()?;
        // All are checked before the first is taken, so that an error changes none of them.
        let mut seen = HashSet::with_capacity(reservations.len());
        for (at, reservation) in reservations.iter().enumerate() {
            reservation.borrow().check()?;
            if !seen.insert(reservation.as_ptr()) {
                let message = format!("reservations[{at}]: the list contains it twice");
                return Err(PyValueError::new_err(message));
            }
        }
        let mut puts = Vec::with_capacity(keys.len());
        for (at, reservation) in reservations.iter().enumerate() {
            let put = keywords.put(at, keys[at], &[], keys.len());
            puts.push(PutSlab {
                key: put.key,
                slab: reservation.borrow_mut().take()?,
                parent: put.parent,
                namespace: put.namespace,
                is_prefix: put.is_prefix,
                is_partial: put.is_partial,
                ttl_ms: put.ttl_ms,
            });
        }
        let outcomes = py.detach(|| store.put_slabs(puts, options));
        PyPutResult::all(py, outcomes)
    }

    /// Reserves memory for those blocks of `size` bytes that the store needs. Returns a
    /// `PreparedPut`, to gather the bytes of the needed blocks and then seal them.
    ///
    /// The keywords are those of `put`. A stored block of the same size counts as present; its
    /// bytes are not compared.
    #[pyo3(signature = (
        keys, size, *, parent = None, chain = true, is_prefix = false, last_is_partial = false,
        ttl = None, namespace = None, timeout = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn prepare(
        slf: Bound<'_, Self>,
        keys: Keys,
        #[pyo3(from_py_with = of::size)] size: usize,
        parent: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = of::chain)] chain: bool,
        #[pyo3(from_py_with = of::is_prefix)] is_prefix: bool,
        #[pyo3(from_py_with = of::last_is_partial)] last_is_partial: bool,
        #[pyo3(from_py_with = of::ttl)] ttl: Option<u64>,
        #[pyo3(from_py_with = namespace_id)] namespace: Option<NamespaceId>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<PyPreparedPut> {
        let parents = parents(&keys, parent, chain)?;
        let namespace = namespace.unwrap_or_default();
        let keywords = PutKeywords { parents, namespace, is_prefix, last_is_partial, ttl_ms: ttl };
        let options = options(timeout);
        let store = slf.get().store()?;
        let put = |(at, key): (usize, &BlockKey)| keywords.put(at, *key, &[], keys.len());
        let puts: Vec<Put<'_>> = keys.iter().enumerate().map(put).collect();
        let prepared = slf.py().detach(|| store.prepare(&puts, &vec![size; puts.len()], options));
        Ok(PyPreparedPut::new(slf.unbind(), &puts, size, prepared))
    }

    /// Copies blocks into buffers. Returns a `GetResult` for each. For a text key, returns bytes,
    /// or `None` for a miss.
    ///
    /// `buffers` is a writable buffer for each key, or one buffer for all blocks in equal pieces. A
    /// block that does not fit is not copied; its result has the size that it needs.
    #[pyo3(signature = (keys, buffers = None, *, timeout = None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        keys: CallKeys,
        buffers: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = options(timeout);
        let Some(buffers) = keys.buffers(buffers)? else {
            let store = self.store()?;
            return keys.get_text(py, &*store, options)?.into_bound_py_any(py);
        };
        let mut targets = Targets::new(buffers, keys.len())?;
        let store = self.store()?;
        let outcomes = py.detach(|| store.get(&keys, &mut targets.slices(), options));
        keys.results(py, outcomes.into_iter().map(PyGetResult::from).collect())
    }

    /// Returns views of blocks in the pool, without a copy: a sequence of `View`, or `None` for a
    /// miss.
    #[pyo3(signature = (keys, *, timeout = None))]
    fn view(
        &self,
        py: Python<'_>,
        keys: Keys,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<PyViews> {
        let options = options(timeout);
        let store = self.store()?;
        Ok(PyViews::new(py.detach(|| store.view(&keys, options))))
    }

    /// Returns the leading blocks of a chain that are available, and their tiers. Counts as a use.
    ///
    /// `at` is the time of the request in seconds on the caller's clock, which must never go back.
    /// The default is the store's clock.
    #[pyo3(signature = (keys, *, partial_tail = false, hints = None, at = None))]
    fn lookup_prefix(
        &self,
        py: Python<'_>,
        keys: Keys,
        #[pyo3(from_py_with = of::partial_tail)] partial_tail: bool,
        hints: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = of::at)] at: Option<Duration>,
    ) -> PyResult<PyPrefixMatch> {
        let hints = self::hints(hints)?;
        let request = Request { keys: &keys, partial_tail, hints, at };
        let store = self.store()?;
        Ok(py.detach(|| store.lookup_prefix(&request)).into())
    }

    /// Like `lookup_prefix`, and returns views of the available leading blocks in the same call.
    #[pyo3(signature = (keys, *, partial_tail = false, hints = None, at = None, timeout = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn acquire(
        &self,
        py: Python<'_>,
        keys: Keys,
        #[pyo3(from_py_with = of::partial_tail)] partial_tail: bool,
        hints: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = of::at)] at: Option<Duration>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<PyViews> {
        let hints = self::hints(hints)?;
        let options = options(timeout);
        let request = Request { keys: &keys, partial_tail, hints, at };
        let store = self.store()?;
        Ok(PyViews::new(py.detach(|| store.acquire(&request, options))))
    }

    /// Gives hints about a chain without a lookup.
    #[pyo3(signature = (keys, *, hints, at = None))]
    fn hint(
        &self,
        py: Python<'_>,
        keys: Keys,
        hints: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::at)] at: Option<Duration>,
    ) -> PyResult<()> {
        let hints = self::hints(Some(hints))?;
        let request = Request { keys: &keys, partial_tail: false, hints, at };
        let store = self.store()?;
        py.detach(|| store.hint(&request));
        Ok(())
    }

    /// Returns whether each block is in any tier. Does not count as a use.
    fn contains<'py>(&self, py: Python<'py>, keys: CallKeys) -> PyResult<Bound<'py, PyAny>> {
        let store = self.store()?;
        keys.results(py, py.detach(|| store.contains(&keys)))
    }

    /// Returns the tiers that have each block, from fast to slow.
    fn locate<'py>(&self, py: Python<'py>, keys: CallKeys) -> PyResult<Bound<'py, PyAny>> {
        let store = self.store()?;
        let tiers = py.detach(|| store.locate(&keys));
        let names = |tiers: Vec<_>| tiers.iter().map(|tier| tier_name(py, tier)).collect();
        keys.results(py, tiers.into_iter().map(names).collect::<Vec<Vec<_>>>())
    }

    /// Keeps blocks in memory until as many calls of `unpin`. Returns whether each is pinned.
    fn pin(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<bool>> {
        let store = self.store()?;
        Ok(py.detach(|| store.pin(&keys)))
    }

    /// Removes one pin from each block. Returns whether each had one.
    fn unpin(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<bool>> {
        let store = self.store()?;
        Ok(py.detach(|| store.unpin(&keys)))
    }

    /// Deletes blocks from all tiers. Returns whether each was stored. Views of them stay valid.
    fn delete<'py>(&self, py: Python<'py>, keys: CallKeys) -> PyResult<Bound<'py, PyAny>> {
        let store = self.store()?;
        keys.results(py, py.detach(|| store.delete(&keys)))
    }

    /// Loads blocks into memory in the background. Returns the number of accepted blocks.
    fn prefetch(&self, py: Python<'_>, keys: Keys) -> PyResult<usize> {
        let store = self.store()?;
        Ok(py.detach(|| store.prefetch(&keys)))
    }

    /// Stores the manifest of a namespace, so that `cascade explain` can name the fields in which
    /// two namespaces differ.
    #[pyo3(signature = (namespace, *, timeout = None))]
    fn register(
        &self,
        py: Python<'_>,
        namespace: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<()> {
        let options = options(timeout);
        let Ok(space) = namespace.cast::<PyNamespace>() else {
            return Err(type_error("namespace", namespace, "a Namespace"));
        };
        let (space, store) = (space.get(), self.store()?);
        py.detach(|| store.register(&space.0, options)).map_err(|error| to_python(&error))
    }

    /// Waits until every tier has the blocks that were put, also after a restart.
    #[pyo3(signature = (*, timeout = None))]
    fn flush(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<()> {
        let options = options(timeout);
        let store = self.store()?;
        py.detach(|| store.flush(options)).map_err(|error| to_python(&error))
    }

    /// Deletes all blocks from all tiers.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.store()?;
        py.detach(|| store.clear());
        Ok(())
    }

    /// Returns the changes since `since`, the `next` of an earlier result. Without it, returns the
    /// stored keys.
    ///
    /// Returns at most `limit` changes; a served store returns at most 65,536.
    #[pyo3(signature = (since = None, *, limit = 65_536))]
    fn changes(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::since)] since: Option<Vec<u8>>,
        #[pyo3(from_py_with = of::limit)] limit: usize,
    ) -> PyResult<PyChanges> {
        let since = since.as_deref().map(cursor).transpose()?;
        let store = self.store()?;
        let changes = py.detach(|| store.changes(since, limit));
        changes.map(PyChanges::from).map_err(|error| to_python(&error))
    }

    /// Returns the statistics that `Stats` describes. After `close`, returns the last ones.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // The lock is released first: Python may switch threads while it makes the dictionary, and
        // another thread would wait for the lock while it holds the interpreter.
        let state = self.lock()?.clone();
        match state {
            StoreState::Open(store) => stats::to_dict(py, &py.detach(|| store.stats())),
            StoreState::Closed(stats) => stats::to_dict(py, &stats),
        }
    }

    /// Writes pending blocks, stops the store's threads and closes its files. Further calls do
    /// nothing.
    ///
    /// Raises `DeadlineError` if some blocks were not written in time. The store is closed anyway.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let store = match &*self.lock()? {
            StoreState::Open(store) => Arc::clone(store),
            StoreState::Closed(_) => return Ok(()),
        };
        // The statistics of an embedded store change until it is closed. Those of a node are
        // requested over the connection, which ends with the close.
        let is_served = self.config.is_none();
        let (closed, stats) = py.detach(|| {
            let stats = is_served.then(|| store.stats());
            let closed = store.close();
            (closed, stats.unwrap_or_else(|| store.stats()))
        });
        *self.lock()? = StoreState::Closed(Box::new(stats));
        // The last handle releases the lock of the files and the pool, except slabs under views.
        py.detach(|| drop(store));
        closed.map_err(|error| to_python(&error))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Store cannot be pickled; open one in each process"))
    }

    fn __repr__(&self) -> String {
        format!("<Store {}>", self.place)
    }
}

impl Drop for PyStore {
    fn drop(&mut self) {
        // In a forked child, `lock` fails and the store is leaked. Otherwise the close waits for
        // threads that may need the interpreter, so this thread detaches from it.
        let Ok(mut state) = self.lock() else { return };
        let closed = StoreState::Closed(Box::default());
        let StoreState::Open(store) = std::mem::replace(&mut *state, closed) else { return };
        drop(state);
        let mut store = Some(store);
        Python::try_attach(|py| py.detach(|| drop(store.take())));
    }
}

impl PyStore {
    /// A store that is a client of the node at `place`.
    pub(crate) fn of_client(client: Arc<dyn BlockStore>, place: String) -> Self {
        let state = ProcessBound::new(Mutex::new(StoreState::Open(client)));
        Self { state, config: None, place }
    }

    fn lock(&self) -> PyResult<MutexGuard<'_, StoreState>> {
        Ok(self.state.get("store")?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A handle for one call. If the store is closed meanwhile, the store refuses the call.
    pub(crate) fn store(&self) -> PyResult<Arc<dyn BlockStore>> {
        match &*self.lock()? {
            StoreState::Open(store) => Ok(Arc::clone(store)),
            StoreState::Closed(_) => Err(to_python(&StoreError::Closed)),
        }
    }
}

/// Refuses a file as the directory of the file tier, before anything is opened.
fn refuse_file_as_directory(config: &StoreConfig) -> PyResult<()> {
    let directory = config.files.as_ref().map(|files| files.directory.as_path());
    match directory.filter(|path| path.exists() && !path.is_dir()) {
        Some(path) => Err(ConfigError::new_err(format!(
            "files: {} is not a directory; give a directory that only this store uses",
            path.display()
        ))),
        None => Ok(()),
    }
}

pub(crate) fn options(timeout: Option<Duration>) -> CallOptions {
    CallOptions { timeout, ..CallOptions::default() }
}
