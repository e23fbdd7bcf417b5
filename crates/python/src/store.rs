//! The store in Python: batches in, a result for each block out, the interpreter free meanwhile.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, NamespaceId, SystemClock};
use cascade_store::{
    BlockStore, CallOptions, Put, PutSlab, Request, Stats, Store, StoreConfig, StoreError,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyType};

use crate::arguments::{self, of, wrong};
use crate::buffers::{PyReservation, Sources, Targets};
use crate::changes::{PyChanges, cursor};
use crate::config::store_config;
use crate::errors::{ConfigError, to_python};
use crate::hints::hints;
use crate::keys::{Keys, key_of};
use crate::namespace::PyNamespace;
use crate::owned::Owned;
use crate::prepared::PyPreparedPut;
use crate::results::{PyGetResult, PyPrefixMatch, PyPutResult, tier_name};
use crate::stages::Stages;
use crate::stats;
use crate::view::PyViews;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyStore>()
}

/// Most reservations of one call, whose iterable may have no end.
const RESERVATIONS_MAX: usize = 1 << 20;

static STORE_CONFIG: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// A block store: tiers of memory and files behind one set of calls.
///
/// Settings are those of `StoreConfig`, given as keywords or as one configuration; `stages` are
/// objects that stand in the pipeline under their names (`cascadekv.stages`). Calls take batches,
/// answer for each block in order, and are safe from any thread. A context manager.
#[pyclass(name = "Store", module = "cascadekv", frozen)]
#[derive(Debug)]
pub(crate) struct PyStore {
    state: Owned<Mutex<Opened>>,
    /// Of an embedded store; a served one has its node's.
    config: Option<Py<PyAny>>,
    /// Where it is: a pipeline, or a node's socket.
    place: String,
}

/// A closed store keeps no files open and no memory, only what it counted.
#[derive(Debug)]
enum Opened {
    Yes(Arc<dyn BlockStore>),
    No(Box<Stats>),
}

/// What the keywords of a put say of its blocks.
struct Facts {
    parents: Vec<Option<BlockKey>>,
    namespace: NamespaceId,
    is_prefix: bool,
    last_is_partial: bool,
    ttl_ms: Option<u64>,
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
                    "pass a StoreConfig or keywords, not both; dataclasses.replace changes a \
                     configuration",
                ));
            }
            (Some(config), None) if config.is_instance(class)? => config,
            (Some(config), None) => {
                let what = "a StoreConfig; settings in a dict go in as Store(**settings)";
                return Err(wrong("config", &config, what));
            }
            (None, settings) => {
                let settings = settings.unwrap_or_else(|| PyDict::new(py));
                class.call_method1("from_dict", (settings,))?
            }
        };
        let settings = store_config(&config)?;
        refuse_a_file(&settings)?;
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
        stages.belong_to(&store);
        let place = config.getattr("pipeline")?.to_string();
        let state = Owned::new(Mutex::new(Opened::Yes(store)));
        Ok(Self { state, config: Some(config.unbind()), place })
    }

    /// The settings that an embedded store runs with; `None` for a served one.
    #[getter]
    fn config(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.config.as_ref().map(|config| config.clone_ref(py))
    }

    /// Stores blocks. Returns a `PutResult` for each.
    ///
    /// `blocks` is a buffer for each key, or one buffer that holds them all in equal pieces; do not
    /// change them until the call returns. The keys of one call are consecutive blocks of one chain
    /// that begins below `parent`, unless `chain` is false. `ttl` and `timeout` are durations:
    /// seconds, text such as `"5s"`, or a `timedelta`.
    #[pyo3(signature = (
        keys, blocks, *, parent = None, chain = true, is_prefix = false, last_is_partial = false,
        ttl = None, namespace = None, timeout = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn put(
        &self,
        py: Python<'_>,
        keys: Keys,
        blocks: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = of::chain)] chain: bool,
        #[pyo3(from_py_with = of::is_prefix)] is_prefix: bool,
        #[pyo3(from_py_with = of::last_is_partial)] last_is_partial: bool,
        #[pyo3(from_py_with = of::ttl)] ttl: Option<u64>,
        #[pyo3(from_py_with = arguments::namespace)] namespace: Option<NamespaceId>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<Vec<PyPutResult>> {
        let parents = parents(&keys, parent, chain)?;
        let namespace = namespace.unwrap_or_default();
        let facts = Facts { parents, namespace, is_prefix, last_is_partial, ttl_ms: ttl };
        let options = options(timeout);
        let sources = Sources::new(blocks, keys.len())?;
        let store = self.store()?;
        let outcomes = py.detach(|| {
            let puts: Vec<Put<'_>> = sources
                .slices()
                .into_iter()
                .enumerate()
                .map(|(at, bytes)| facts.put(at, keys[at], bytes, keys.len()))
                .collect();
            store.put(&puts, options)
        });
        Ok(outcomes.into_iter().map(PyPutResult::from).collect())
    }

    /// Memory of the pool for a block of that many bytes, to write in place and then put.
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

    /// Stores blocks that were written in place, without a copy. Keywords as for `put`.
    ///
    /// Every array and memoryview on the reservations must be released before.
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
        #[pyo3(from_py_with = arguments::namespace)] namespace: Option<NamespaceId>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<Vec<PyPutResult>> {
        if reservations.len() != keys.len() {
            let (keys, got) = (keys.len(), reservations.len());
            return Err(PyValueError::new_err(format!("reservations: {keys} keys but {got}")));
        }
        let parents = parents(&keys, parent, chain)?;
        let namespace = namespace.unwrap_or_default();
        let facts = Facts { parents, namespace, is_prefix, last_is_partial, ttl_ms: ttl };
        let options = options(timeout);
        let store = self.store()?;
        // All are checked before any is taken, so that an error leaves every one as it was.
        for (at, reservation) in reservations.iter().enumerate() {
            reservation.borrow().check()?;
            if reservations[..at].iter().any(|earlier| earlier.is(reservation)) {
                return Err(PyValueError::new_err(format!(
                    "reservations[{at}]: it is there twice"
                )));
            }
        }
        let mut puts = Vec::with_capacity(keys.len());
        for (at, reservation) in reservations.iter().enumerate() {
            let put = facts.put(at, keys[at], &[], keys.len());
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
        Ok(outcomes.into_iter().map(PyPutResult::from).collect())
    }

    /// Asks which of some blocks of `size` bytes the store wants, and takes memory for them.
    ///
    /// Keywords as for `put`. A key that is there with as many bytes is present, whatever they are.
    /// Returns a `PreparedPut`, to gather the wanted blocks and then seal.
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
        #[pyo3(from_py_with = arguments::namespace)] namespace: Option<NamespaceId>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<PyPreparedPut> {
        let parents = parents(&keys, parent, chain)?;
        let namespace = namespace.unwrap_or_default();
        let facts = Facts { parents, namespace, is_prefix, last_is_partial, ttl_ms: ttl };
        let options = options(timeout);
        let store = slf.get().store()?;
        let put = |(at, key): (usize, &BlockKey)| facts.put(at, *key, &[], keys.len());
        let puts: Vec<Put<'_>> = keys.iter().enumerate().map(put).collect();
        let prepared = slf.py().detach(|| store.prepare(&puts, &vec![size; puts.len()], options));
        Ok(PyPreparedPut::new(slf.unbind(), &puts, size, prepared))
    }

    /// Copies blocks into buffers. Returns a `GetResult` for each.
    ///
    /// `buffers` is a writable buffer for each key, or one that has room for all in equal pieces.
    /// A block that does not fit is not copied; its result says how much it needs.
    #[pyo3(signature = (keys, buffers, *, timeout = None))]
    fn get(
        &self,
        py: Python<'_>,
        keys: Keys,
        buffers: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<Vec<PyGetResult>> {
        let options = options(timeout);
        let mut targets = Targets::new(buffers, keys.len())?;
        let store = self.store()?;
        let outcomes = py.detach(|| store.get(&keys, &mut targets.slices(), options));
        Ok(outcomes.into_iter().map(PyGetResult::from).collect())
    }

    /// Views on blocks in the pool, without a copy: a sequence of `View`, `None` for a miss.
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

    /// How many leading blocks of a chain are available, and where. Counts as a use of them.
    ///
    /// `at` is the time of the request in seconds, on a scale of the caller's that never goes back;
    /// the store's clock otherwise.
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

    /// As `lookup_prefix`, and views on the leading blocks that are available, in one call.
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

    /// Says what a caller knows about a chain, without asking for it.
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

    /// Whether each block is in any tier. Counts as no use.
    fn contains(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<bool>> {
        let store = self.store()?;
        Ok(py.detach(|| store.contains(&keys)))
    }

    /// The tiers that have each block, fast to slow.
    fn locate<'py>(&self, py: Python<'py>, keys: Keys) -> PyResult<Vec<Vec<Bound<'py, PyString>>>> {
        let store = self.store()?;
        let tiers = py.detach(|| store.locate(&keys));
        let names = |tiers: Vec<_>| tiers.iter().map(|tier| tier_name(py, tier)).collect();
        Ok(tiers.into_iter().map(names).collect())
    }

    /// Keeps blocks in memory until `unpin`, counted. Returns whether each is pinned now.
    fn pin(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<bool>> {
        let store = self.store()?;
        Ok(py.detach(|| store.pin(&keys)))
    }

    /// Takes one pin from each block. Returns whether each had one.
    fn unpin(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<bool>> {
        let store = self.store()?;
        Ok(py.detach(|| store.unpin(&keys)))
    }

    /// Forgets blocks in every tier. Returns whether each was there. Views on them stay right.
    fn delete(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<bool>> {
        let store = self.store()?;
        Ok(py.detach(|| store.delete(&keys)))
    }

    /// Asks for blocks to be brought to memory in the background. Returns how many were accepted.
    fn prefetch(&self, py: Python<'_>, keys: Keys) -> PyResult<usize> {
        let store = self.store()?;
        Ok(py.detach(|| store.prefetch(&keys)))
    }

    /// Keeps a namespace's manifest with the data, so that `cascade explain` can name the field in
    /// which two namespaces differ.
    #[pyo3(signature = (namespace, *, timeout = None))]
    fn register(
        &self,
        py: Python<'_>,
        namespace: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<()> {
        let options = options(timeout);
        let Ok(space) = namespace.cast::<PyNamespace>() else {
            return Err(wrong("namespace", namespace, "a Namespace"));
        };
        let (space, store) = (space.get(), self.store()?);
        py.detach(|| store.register(&space.0, options)).map_err(|error| to_python(&error))
    }

    /// Waits until every tier has what was put, and would have it after a restart.
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

    /// Forgets every block in every tier.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.store()?;
        py.detach(|| store.clear());
        Ok(())
    }

    /// What came and went since the answer that gave `since`; without it, what is here now.
    ///
    /// At most `limit` changes; a served store tells 65,536 at most.
    #[pyo3(signature = (since = None, *, limit = 65_536))]
    fn changes(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::since)] since: Option<Vec<u8>>,
        #[pyo3(from_py_with = of::limit)] limit: usize,
    ) -> PyResult<PyChanges> {
        let since = since.as_deref().map(cursor).transpose()?;
        let store = self.store()?;
        let told = py.detach(|| store.changes(since, limit)).map_err(|error| to_python(&error))?;
        Ok(told.into())
    }

    /// What the store holds and did, as `Stats` describes it. Also after `close`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let store = match &*self.lock()? {
            Opened::Yes(store) => Arc::clone(store),
            Opened::No(stats) => return stats::to_dict(py, stats),
        };
        stats::to_dict(py, &py.detach(|| store.stats()))
    }

    /// Writes down what waits, stops the store's threads and closes its files. May be repeated.
    ///
    /// Raises `DeadlineError` when not all could be written in time; the store is closed anyway.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let store = match &*self.lock()? {
            Opened::Yes(store) => Arc::clone(store),
            Opened::No(_) => return Ok(()),
        };
        // An embedded store counts until it is closed; a node can be asked only until then.
        let is_served = self.config.is_none();
        let (closed, counted) = py.detach(|| {
            let counted = is_served.then(|| store.stats());
            let closed = store.close();
            (closed, counted.unwrap_or_else(|| store.stats()))
        });
        *self.lock()? = Opened::No(Box::new(counted));
        // With the last handle go the files' lock and the pool, but for what views hold.
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
        // Closing waits for threads that may need the interpreter. A forked child has no store.
        let Ok(mut opened) = self.lock() else { return };
        let stats = Opened::No(Box::default());
        let Opened::Yes(store) = std::mem::replace(&mut *opened, stats) else { return };
        drop(opened);
        let mut store = Some(store);
        Python::try_attach(|py| py.detach(|| drop(store.take())));
    }
}

impl PyStore {
    /// A client of a node, `place` being where.
    pub(crate) fn of_client(client: Arc<dyn BlockStore>, place: String) -> Self {
        Self { state: Owned::new(Mutex::new(Opened::Yes(client))), config: None, place }
    }

    fn lock(&self) -> PyResult<MutexGuard<'_, Opened>> {
        Ok(self.state.get("store")?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A handle for one call; what it does is refused by the store itself once that is closed.
    pub(crate) fn store(&self) -> PyResult<Arc<dyn BlockStore>> {
        match &*self.lock()? {
            Opened::Yes(store) => Ok(Arc::clone(store)),
            Opened::No(_) => Err(to_python(&StoreError::Closed)),
        }
    }
}

impl Facts {
    fn put<'a>(&self, at: usize, key: BlockKey, bytes: &'a [u8], count: usize) -> Put<'a> {
        Put {
            key,
            bytes,
            parent: self.parents[at],
            namespace: self.namespace,
            is_prefix: self.is_prefix,
            is_partial: self.last_is_partial && at + 1 == count,
            ttl_ms: self.ttl_ms,
        }
    }
}

/// The reservations of a call.
fn reserved<'py>(given: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyReservation>>> {
    let what = "a list of reservations, one for each key";
    let items = given.try_iter().map_err(|_| wrong("reservations", given, what))?;
    let one = |(at, item): (usize, PyResult<Bound<'py, PyAny>>)| {
        let item = item?;
        let reservation = item.cast::<PyReservation>().cloned();
        reservation.map_err(|_| wrong(format!("reservations[{at}]"), &item, "a Reservation"))
    };
    items.take(RESERVATIONS_MAX).enumerate().map(one).collect()
}

/// Refuses a file tier where a file lies, before anything is opened.
fn refuse_a_file(config: &StoreConfig) -> PyResult<()> {
    let directory = config.files.as_ref().map(|files| files.directory.as_path());
    match directory.filter(|path| path.exists() && !path.is_dir()) {
        Some(path) => Err(ConfigError::new_err(format!(
            "files: {} is not a directory; give one of this store alone",
            path.display()
        ))),
        None => Ok(()),
    }
}

/// The parent of each key of a call.
fn parents(
    keys: &[BlockKey],
    parent: Option<&Bound<'_, PyAny>>,
    chain: bool,
) -> PyResult<Vec<Option<BlockKey>>> {
    let first = parent.map(|parent| key_of("parent", parent)).transpose()?;
    if chain {
        let before = keys.iter().map(|key| Some(*key));
        return Ok([first].into_iter().chain(before).take(keys.len()).collect());
    }
    if first.is_some() {
        return Err(PyValueError::new_err(
            "parent: it says where a chain begins; leave chain true, or parent out",
        ));
    }
    Ok(vec![None; keys.len()])
}

pub(crate) fn options(timeout: Option<Duration>) -> CallOptions {
    CallOptions { timeout, ..CallOptions::default() }
}
