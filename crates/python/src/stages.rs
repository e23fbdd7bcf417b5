//! Stages that are written in Python: what `Store(stages=...)` takes, and the calls to it.

mod calls;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak};

use cascade_block::SystemClock;
use cascade_memory::SlabMut;
use cascade_store::stage::{
    RecordAnswer, RecordStage, Records, Registry, Stage, StageContext, StageError, conformance,
};
use cascade_store::{BlockStore, Pipeline, StoreConfig, intern};
use pyo3::exceptions::{PyAssertionError, PyBufferError, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyMemoryView, PyTuple};

use self::calls::{Calls, Made, Methods, Taken};
use crate::arguments::{shown, text, wrong};
use crate::buffers::{PyReservation, PyView};
use crate::errors::{ConfigError, to_python};
use crate::owned::Owned;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyStageCalls>()?;
    module.add_class::<PyStageCall>()?;
    module.add_function(wrap_pyfunction!(check_stage, module)?)
}

const REQUIRED: [&str; 4] = ["put", "get", "delete", "names"];
/// Most threads that one stage may ask for: as many as loads that wait for it.
const THREADS_MAX: usize = 16;

/// The stages of one store, before and after it is opened.
pub(crate) struct Stages {
    registry: Registry,
    started: Vec<Py<PyStageCalls>>,
}

/// A stage that was looked at.
struct Plugin<'py> {
    name: String,
    object: Bound<'py, PyAny>,
    methods: Methods,
    capacity_bytes: Option<u64>,
    threads: usize,
}

impl Stages {
    /// Looks at what a store was given, and starts its threads.
    pub(crate) fn new(stages: Option<&Bound<'_, PyAny>>, config: &StoreConfig) -> PyResult<Self> {
        let mut this = Self { registry: Registry::default(), started: Vec::new() };
        let Some(stages) = stages else { return Ok(this) };
        let Ok(stages) = stages.cast::<PyDict>() else {
            return Err(wrong("stages", stages, "a dict of names and stages"));
        };
        let plugins = stages
            .iter()
            .map(|(name, object)| {
                let name = text("stages: a name", &name)?;
                Plugin::new(name, object, &this.registry)
            })
            .collect::<PyResult<Vec<_>>>()?;
        let begun = plugins.iter().try_for_each(|plugin| {
            let calls = plugin.start(&mut this.started)?;
            let (name, capacity_bytes) =
                (intern(&plugin.name.to_lowercase()), plugin.capacity_bytes);
            let make = move |context: &StageContext<'_>| {
                RecordStage::open(name, calls.clone(), capacity_bytes, context)
            };
            this.registry.register(&plugin.name, Arc::new(make));
            Ok(())
        });
        let checked = begun.and_then(|()| check_pipeline(config, &this.registry, &plugins));
        if checked.is_err() {
            this.end();
        }
        checked.map(|()| this)
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// What is still open when the interpreter ends is closed then, while Python can still run.
    pub(crate) fn belong_to(&self, store: &Arc<dyn BlockStore>) {
        for calls in &self.started {
            drop(calls.get().store.set(Owned::new(Arc::downgrade(store))));
        }
    }

    /// The store was not opened.
    pub(crate) fn end(&self) {
        for calls in &self.started {
            drop(calls.get().end());
        }
    }
}

impl<'py> Plugin<'py> {
    fn new(name: String, object: Bound<'py, PyAny>, registry: &Registry) -> PyResult<Self> {
        let bad = |reason: String| Err(ConfigError::new_err(format!("stages: {name}: {reason}")));
        let kind = object.get_type().qualname()?;
        if name.trim() != name || name.is_empty() || name.contains('|') {
            return bad("a stage's name is a word as it stands in a pipeline".to_owned());
        }
        let own = registry.names();
        if own.contains(&name.to_lowercase()) || ["hbm", "peers"].contains(&&*name.to_lowercase()) {
            return bad("that is a stage of Cascade's own; choose another name".to_owned());
        }
        let has = |method: &str| {
            object.getattr_opt(method).map(|found| found.is_some_and(|found| found.is_callable()))
        };
        for method in REQUIRED {
            if !has(method)? {
                let all = REQUIRED.join(", ");
                return bad(format!("{kind} has no method {method}; a stage has {all}"));
            }
        }
        let methods = Methods { flush: has("flush")?, probe: has("probe")?, close: has("close")? };
        let number = |attribute: &str| -> PyResult<Option<u64>> {
            let Some(value) = object.getattr_opt(attribute)?.filter(|value| !value.is_none())
            else {
                return Ok(None);
            };
            let told = format!(
                "stages: {name}: {kind}.{attribute}: {} is not a number from 1 up",
                shown(&value)
            );
            let number = value.extract().ok().filter(|number| *number > 0);
            number.map(Some).ok_or_else(|| ConfigError::new_err(told))
        };
        let capacity_bytes = number("capacity_bytes")?;
        let threads = usize::try_from(number("threads")?.unwrap_or(1)).unwrap_or(usize::MAX);
        if threads > THREADS_MAX {
            return bad(format!("{kind}.threads is {threads}; the most is {THREADS_MAX}"));
        }
        Ok(Self { name, object, methods, capacity_bytes, threads })
    }

    /// Starts its threads; `started` has them even when not all could be.
    fn start(&self, started: &mut Vec<Py<PyStageCalls>>) -> PyResult<Arc<Calls>> {
        let py = self.object.py();
        let calls = Arc::new(Calls::new(self.methods));
        let handle = PyStageCalls { calls: Owned::new(Arc::clone(&calls)), store: OnceLock::new() };
        let handle = Bound::new(py, handle)?;
        started.push(handle.clone().unbind());
        let start = py.import("cascadekv.stages")?.getattr("start_threads")?;
        start.call1((&self.name, &self.object, handle, self.threads))?;
        Ok(calls)
    }
}

/// Every stage that was given stands in the pipeline.
fn check_pipeline(
    config: &StoreConfig,
    registry: &Registry,
    plugins: &[Plugin<'_>],
) -> PyResult<()> {
    let parsed = Pipeline::parse(&config.pipeline, registry);
    let pipeline = parsed.map_err(|error| to_python(&error.into()))?;
    let absent =
        plugins.iter().find(|plugin| !pipeline.lower.contains(&plugin.name.to_lowercase()));
    absent.map_or(Ok(()), |Plugin { name, .. }| {
        Err(ConfigError::new_err(format!(
            "stages: {name} does not stand in the pipeline {:?}; name it there, such as \
             \"Dram|{name}\"",
            config.pipeline
        )))
    })
}

/// The calls to one stage, for the threads that make them.
#[pyclass(name = "StageCalls", module = "cascadekv._native", frozen)]
pub(crate) struct PyStageCalls {
    calls: Owned<Arc<Calls>>,
    store: OnceLock<Owned<Weak<dyn BlockStore>>>,
}

#[pymethods]
impl PyStageCalls {
    /// Waits for the next call; `None` when there will be none any more.
    fn next(&self, py: Python<'_>) -> PyResult<Option<PyStageCall>> {
        let calls = self.calls.get("stage")?;
        // At the interpreter's end a thread that let go of it could not take it again.
        if calls.is_closed() {
            return Ok(None);
        }
        let next = py.detach(|| calls.next());
        next.map(|(taken, made)| PyStageCall::new(py, taken, made)).transpose()
    }

    /// Closes the store that the stage belongs to, if it is still open.
    fn close_store(&self, py: Python<'_>) -> PyResult<()> {
        let Some(store) = self.store.get() else { return Ok(()) };
        let store = store.get("store")?;
        let closed = py.detach(|| store.upgrade().map(|store| store.close()));
        closed.unwrap_or(Ok(())).map_err(|error| to_python(&error))
    }

    /// Ends the threads that wait for calls.
    fn end(&self) -> PyResult<()> {
        self.calls.get("stage")?.end();
        Ok(())
    }
}

/// One call to a stage: `method(*arguments)` is to be called, and then one of the others, once.
#[pyclass(name = "StageCall", module = "cascadekv._native")]
pub(crate) struct PyStageCall {
    taken: Option<Owned<Taken>>,
    method: &'static str,
    arguments: Option<Py<PyTuple>>,
    view: Option<Py<PyMemoryView>>,
    room: Option<Py<PyReservation>>,
}

#[pymethods]
impl PyStageCall {
    /// What to call.
    #[getter]
    fn method(&self) -> &str {
        self.method
    }

    /// With what. They can be taken once.
    fn take_arguments(&mut self) -> PyResult<Py<PyTuple>> {
        self.arguments.take().ok_or_else(|| PyRuntimeError::new_err("the arguments were taken"))
    }

    /// Says what the method returned.
    fn answer(&mut self, py: Python<'_>, result: &Bound<'_, PyAny>) -> PyResult<()> {
        let released = self.release(py);
        let answer = match self.method {
            "get" => {
                let bytes = count(result)?;
                released?;
                RecordAnswer::Got { buffer: self.take_room(py)?, bytes }
            }
            "names" => RecordAnswer::Names(result.extract()?),
            // Views that are kept of a record that was put show what nobody changes.
            _ => RecordAnswer::Done,
        };
        self.give(Ok(answer))
    }

    /// Says that there is no such record.
    fn miss(&mut self, py: Python<'_>) -> PyResult<()> {
        drop(self.release(py));
        self.give(Ok(RecordAnswer::Missing))
    }

    /// Says that there is no room for the record.
    fn overflow(&mut self, py: Python<'_>) -> PyResult<()> {
        drop(self.release(py));
        self.give(Err(StageError::Full))
    }

    /// Says that it failed, and how.
    fn fail(&mut self, py: Python<'_>, reason: String) -> PyResult<()> {
        drop(self.release(py));
        self.give(Err(StageError::Failed(Arc::new(std::io::Error::other(reason)))))
    }
}

impl PyStageCall {
    fn new(py: Python<'_>, taken: Taken, made: Made) -> PyResult<Self> {
        let taken = Some(Owned::new(taken));
        let mut this = Self { taken, method: "", arguments: None, view: None, room: None };
        let arguments = match made {
            Made::Put(name, slab) => {
                this.method = "put";
                let view =
                    PyMemoryView::from(Bound::new(py, PyView::new(slab, "a record"))?.as_any())?;
                this.view = Some(view.clone().unbind());
                (name, view).into_pyobject(py)?
            }
            Made::Get(name, slab) => {
                this.method = "get";
                let room = Bound::new(py, PyReservation::new(slab))?;
                let view = PyMemoryView::from(room.as_any())?;
                this.view = Some(view.clone().unbind());
                this.room = Some(room.unbind());
                (name, view).into_pyobject(py)?
            }
            Made::Delete(names) => {
                this.method = "delete";
                (names,).into_pyobject(py)?
            }
            Made::Bare(method) => {
                this.method = method;
                PyTuple::empty(py)
            }
        };
        this.arguments = Some(arguments.unbind());
        Ok(this)
    }

    /// Ends the memoryview that the method got.
    fn release(&mut self, py: Python<'_>) -> PyResult<()> {
        self.arguments = None;
        let Some(view) = self.view.take() else { return Ok(()) };
        view.bind(py).call_method0("release").map(drop)
    }

    /// The memory that was filled, which nobody else can write any more.
    fn take_room(&mut self, py: Python<'_>) -> PyResult<SlabMut> {
        let room = self.room.take();
        let room = room.ok_or_else(|| PyBufferError::new_err("there is no memory to fill"))?;
        room.bind(py).borrow_mut().take()
    }

    fn give(&mut self, answer: Result<RecordAnswer, StageError>) -> PyResult<()> {
        let taken = self.taken.take();
        let taken = taken.ok_or_else(|| PyRuntimeError::new_err("the call was answered"))?;
        taken.into_inner("stage")?.give(answer);
        Ok(())
    }
}

/// How many bytes a `get` says it copied.
fn count(result: &Bound<'_, PyAny>) -> PyResult<usize> {
    if !result.is_instance_of::<PyBool>()
        && let Ok(bytes) = result.extract()
    {
        return Ok(bytes);
    }
    let kind = result.get_type();
    Err(PyTypeError::new_err(format!("get returns how many bytes it copied, not {kind}")))
}

/// Runs the checks that every stage has to pass over stages that `make` makes.
///
/// `make` is called once for each check and gives a stage without records. Raises `AssertionError`
/// with what went wrong.
#[pyfunction]
#[pyo3(signature = (make, /))]
fn check_stage(py: Python<'_>, make: &Bound<'_, PyAny>) -> PyResult<()> {
    if !make.is_callable() {
        return Err(wrong("make", make, "a function that makes a stage"));
    }
    let config = StoreConfig { dram_bytes: 32 << 20, ..StoreConfig::default() };
    let pool = conformance::pool();
    let clock: Arc<dyn cascade_block::Clock> = Arc::new(SystemClock);
    let context = StageContext { config: &config, pool: &pool, clock: &clock };
    let made = make.clone().unbind();
    let mut started = Vec::new();
    let checked = py.detach(|| {
        catch_unwind(AssertUnwindSafe(|| {
            conformance::all(&pool, &mut || {
                // The checks have no way to say that there is no stage.
                open_one(&made, &context, &mut started).expect("a stage that can be opened")
            });
        }))
    });
    for started in &started {
        let calls = started.get().calls.get("stage")?;
        py.detach(|| calls.close());
    }
    checked.map_err(|panic| PyAssertionError::new_err(words_of(&*panic)))
}

fn open_one(
    make: &Py<PyAny>,
    context: &StageContext<'_>,
    started: &mut Vec<Py<PyStageCalls>>,
) -> Result<Arc<dyn Stage>, String> {
    let (calls, capacity_bytes) = Python::attach(|py| {
        let object = make.bind(py).call0()?;
        let plugin = Plugin::new("checked".to_owned(), object, &Registry::default())?;
        Ok((plugin.start(started)?, plugin.capacity_bytes))
    })
    .map_err(|error: PyErr| error.to_string())?;
    let stage = RecordStage::open("checked", calls, capacity_bytes, context);
    stage.map_err(|error| cascade_block::with_causes(&error))
}

/// What a panic says.
fn words_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a check failed".to_owned())
}
