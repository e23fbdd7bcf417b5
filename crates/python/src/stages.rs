//! Stages written in Python, as given to `Store(stages=...)`, and the calls to them.

mod calls;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak};

use cascade_memory::HostSlabMut;
use cascade_runtime::SystemClock;
use cascade_store::stages::{RecordAnswer, RecordStage, Records, StageContext, StageRegistry};
use cascade_store::{BlockStore, Pipeline, StoreConfig, intern};
use cascade_tier::conformance::tier as conformance;
use cascade_tier::tier::{Tier, TierError};
use pyo3::exceptions::{PyAssertionError, PyBufferError, PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyMemoryView, PyTuple};

use self::calls::{CallInProgress, CallQueue, Invocation, OptionalMethods};
use crate::arguments::{shown, text, type_error};
use crate::buffers::{PyReservation, PyView, in_device_memory};
use crate::errors::{ConfigError, to_python};
use crate::process_bound::ProcessBound;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyStageCalls>()?;
    module.add_class::<PyStageCall>()?;
    module.add_function(wrap_pyfunction!(check_stage, module)?)
}

const REQUIRED: [&str; 4] = ["put", "get", "delete", "names"];
/// Limit of the threads of one stage. As many loads may wait for it.
const THREADS_MAX: usize = 16;

/// The Python stages of one store.
pub(crate) struct Stages {
    registry: StageRegistry,
    started: Vec<Py<PyStageCalls>>,
}

/// A checked Python stage.
struct PythonStage<'py> {
    name: String,
    object: Bound<'py, PyAny>,
    methods: OptionalMethods,
    capacity_bytes: Option<u64>,
    threads: usize,
}

impl Stages {
    /// Checks the stages of a store and starts their threads.
    pub(crate) fn new(stages: Option<&Bound<'_, PyAny>>, config: &StoreConfig) -> PyResult<Self> {
        let mut this = Self { registry: StageRegistry::default(), started: Vec::new() };
        let Some(stages) = stages else { return Ok(this) };
        let Ok(stages) = stages.cast::<PyDict>() else {
            return Err(type_error("stages", stages, "a dict of names and stages"));
        };
        let stages = stages
            .iter()
            .map(|(name, object)| {
                let name = text("stages: a name", &name)?;
                PythonStage::new(name, object, &this.registry)
            })
            .collect::<PyResult<Vec<_>>>()?;
        let started = stages.iter().try_for_each(|stage| {
            let calls = stage.start(&mut this.started)?;
            let (name, capacity_bytes) = (intern(&stage.name.to_lowercase()), stage.capacity_bytes);
            let make = move |context: &StageContext<'_>| {
                RecordStage::open(name, calls.clone(), capacity_bytes, context)
            };
            this.registry.register(&stage.name, Arc::new(make));
            Ok(())
        });
        let checked = started.and_then(|()| check_pipeline(config, &this.registry, &stages));
        if checked.is_err() {
            this.end();
        }
        checked.map(|()| this)
    }

    pub(crate) fn registry(&self) -> &StageRegistry {
        &self.registry
    }

    /// Lets the stages close the store at the exit of the interpreter, while Python can still run.
    pub(crate) fn set_store(&self, store: &Arc<dyn BlockStore>) {
        for calls in &self.started {
            drop(calls.get().store.set(ProcessBound::new(Arc::downgrade(store))));
        }
    }

    /// Ends the threads of the stages, when the store could not be opened.
    pub(crate) fn end(&self) {
        for calls in &self.started {
            drop(calls.get().end());
        }
    }
}

impl<'py> PythonStage<'py> {
    fn new(name: String, object: Bound<'py, PyAny>, registry: &StageRegistry) -> PyResult<Self> {
        let refuse =
            |reason: String| Err(ConfigError::new_err(format!("stages: {name}: {reason}")));
        let class = object.get_type().qualname()?;
        if name.trim() != name || name.is_empty() || name.contains('|') {
            let reason =
                "a stage's name must not be empty, contain \"|\", or start or end with a space";
            return refuse(reason.to_owned());
        }
        let built_in = registry.names();
        let lowercase = name.to_lowercase();
        if built_in.contains(&lowercase) || ["hbm", "peers"].contains(&&*lowercase) {
            return refuse("this is the name of a built-in stage; choose another one".to_owned());
        }
        let has = |method: &str| {
            object.getattr_opt(method).map(|found| found.is_some_and(|found| found.is_callable()))
        };
        for method in REQUIRED {
            if !has(method)? {
                let all = REQUIRED.join(", ");
                return refuse(format!("{class} has no method {method}; a stage has {all}"));
            }
        }
        let methods =
            OptionalMethods { flush: has("flush")?, probe: has("probe")?, close: has("close")? };
        let number = |attribute: &str| -> PyResult<Option<u64>> {
            let Some(value) = object.getattr_opt(attribute)?.filter(|value| !value.is_none())
            else {
                return Ok(None);
            };
            let message = format!(
                "stages: {name}: {class}.{attribute}: {} is not a whole number from 1 up",
                shown(&value)
            );
            let number = value.extract().ok().filter(|number| *number > 0);
            number.map(Some).ok_or_else(|| ConfigError::new_err(message))
        };
        let capacity_bytes = number("capacity_bytes")?;
        let threads = usize::try_from(number("threads")?.unwrap_or(1)).unwrap_or(usize::MAX);
        if threads > THREADS_MAX {
            return refuse(format!("{class}.threads is {threads}; the limit is {THREADS_MAX}"));
        }
        Ok(Self { name, object, methods, capacity_bytes, threads })
    }

    /// Starts the threads of the stage. `started` gets their handle also if this fails, so that the
    /// threads that did start can be ended.
    fn start(&self, started: &mut Vec<Py<PyStageCalls>>) -> PyResult<Arc<CallQueue>> {
        let py = self.object.py();
        let calls = Arc::new(CallQueue::new(self.methods));
        let bound = ProcessBound::new(Arc::clone(&calls));
        let handle = Bound::new(py, PyStageCalls { calls: bound, store: OnceLock::new() })?;
        started.push(handle.clone().unbind());
        let start = py.import("cascadekv.stages")?.getattr("start_threads")?;
        start.call1((&self.name, &self.object, handle, self.threads))?;
        Ok(calls)
    }
}

/// Refuses a stage that is not in the pipeline, because the store would never call it.
fn check_pipeline(
    config: &StoreConfig,
    registry: &StageRegistry,
    stages: &[PythonStage<'_>],
) -> PyResult<()> {
    let parsed = Pipeline::parse(&config.pipeline, registry);
    let pipeline = parsed.map_err(|error| to_python(&error.into()))?;
    let unused = stages.iter().find(|stage| !pipeline.lower.contains(&stage.name.to_lowercase()));
    unused.map_or(Ok(()), |PythonStage { name, .. }| {
        Err(ConfigError::new_err(format!(
            "stages: {name} is not in the pipeline {:?}; add it, such as \"Dram|{name}\"",
            config.pipeline
        )))
    })
}

/// The queue of calls to one stage, for the Python threads that execute them.
#[pyclass(name = "StageCalls", module = "cascadekv._native", frozen)]
pub(crate) struct PyStageCalls {
    calls: ProcessBound<Arc<CallQueue>>,
    store: OnceLock<ProcessBound<Weak<dyn BlockStore>>>,
}

#[pymethods]
impl PyStageCalls {
    /// Waits for the next call. Returns `None` after the stage was closed.
    fn next(&self, py: Python<'_>) -> PyResult<Option<PyStageCall>> {
        let calls = self.calls.get("stage")?;
        // At the exit of the interpreter, a thread that detaches cannot attach again.
        if calls.is_closed() {
            return Ok(None);
        }
        let next = py.detach(|| calls.next());
        next.map(|(call, invocation)| PyStageCall::new(py, call, invocation)).transpose()
    }

    /// Closes the store of the stage, if it is still open.
    fn close_store(&self, py: Python<'_>) -> PyResult<()> {
        let Some(store) = self.store.get() else { return Ok(()) };
        let store = store.get("store")?;
        let closed = py.detach(|| store.upgrade().map(|store| store.close()));
        closed.unwrap_or(Ok(())).map_err(|error| to_python(&error))
    }

    /// Ends the threads of the stage.
    fn end(&self) -> PyResult<()> {
        self.calls.get("stage")?.end();
        Ok(())
    }
}

/// One call to a stage. Its thread calls `method(*arguments)` and then reports the result with one
/// call of `answer`, `miss`, `overflow` or `fail`.
#[pyclass(name = "StageCall", module = "cascadekv._native")]
pub(crate) struct PyStageCall {
    call: Option<ProcessBound<CallInProgress>>,
    method: &'static str,
    arguments: Option<Py<PyTuple>>,
    /// The memoryview among the arguments.
    view: Option<Py<PyMemoryView>>,
    /// The memory that a `get` fills.
    buffer: Option<Py<PyReservation>>,
}

#[pymethods]
impl PyStageCall {
    /// The name of the method to call.
    #[getter]
    fn method(&self) -> &str {
        self.method
    }

    /// Returns the arguments of the method. May be called once.
    fn take_arguments(&mut self) -> PyResult<Py<PyTuple>> {
        let arguments = self.arguments.take();
        arguments.ok_or_else(|| PyRuntimeError::new_err("the arguments were already taken"))
    }

    /// Reports what the method returned.
    fn answer(&mut self, py: Python<'_>, result: &Bound<'_, PyAny>) -> PyResult<()> {
        let released = self.release(py);
        let answer = match self.method {
            "get" => {
                let bytes = count(result)?;
                released?;
                RecordAnswer::Got { buffer: self.take_buffer(py)?, bytes }
            }
            "names" => RecordAnswer::Names(result.extract()?),
            // A stage may keep views of the record of a put: it is sealed and does not change.
            _ => RecordAnswer::Done,
        };
        self.complete(Ok(answer))
    }

    /// Reports that the record does not exist.
    fn miss(&mut self, py: Python<'_>) -> PyResult<()> {
        drop(self.release(py));
        self.complete(Ok(RecordAnswer::Missing))
    }

    /// Reports that the stage is full.
    fn overflow(&mut self, py: Python<'_>) -> PyResult<()> {
        drop(self.release(py));
        self.complete(Err(TierError::Full))
    }

    /// Reports a failure and its reason.
    fn fail(&mut self, py: Python<'_>, reason: String) -> PyResult<()> {
        drop(self.release(py));
        self.complete(Err(TierError::Failed(Arc::new(std::io::Error::other(reason)))))
    }
}

impl PyStageCall {
    fn new(py: Python<'_>, call: CallInProgress, invocation: Invocation) -> PyResult<Self> {
        let call = Some(ProcessBound::new(call));
        let mut this = Self { call, method: "", arguments: None, view: None, buffer: None };
        let arguments = match invocation {
            Invocation::Put(name, slab) => {
                this.method = "put";
                let view = PyMemoryView::from(
                    Bound::new(py, PyView::new(slab.into_slab(), "a record"))?.as_any(),
                )?;
                this.view = Some(view.clone().unbind());
                (name, view).into_pyobject(py)?
            }
            Invocation::Get(name, slab) => {
                this.method = "get";
                let buffer = Bound::new(py, PyReservation::new(slab.into_slab()))?;
                let view = PyMemoryView::from(buffer.as_any())?;
                this.view = Some(view.clone().unbind());
                this.buffer = Some(buffer.unbind());
                (name, view).into_pyobject(py)?
            }
            Invocation::Delete(names) => {
                this.method = "delete";
                (names,).into_pyobject(py)?
            }
            Invocation::WithoutArguments(method) => {
                this.method = method;
                PyTuple::empty(py)
            }
        };
        this.arguments = Some(arguments.unbind());
        Ok(this)
    }

    /// Releases the memoryview that the method got.
    fn release(&mut self, py: Python<'_>) -> PyResult<()> {
        self.arguments = None;
        let Some(view) = self.view.take() else { return Ok(()) };
        view.bind(py).call_method0("release").map(drop)
    }

    /// The memory that a `get` filled. Fails while the method keeps a buffer of it.
    fn take_buffer(&mut self, py: Python<'_>) -> PyResult<HostSlabMut> {
        let buffer = self.buffer.take();
        let buffer = buffer.ok_or_else(|| PyBufferError::new_err("the call has no buffer"))?;
        let slab = buffer.bind(py).borrow_mut().take()?;
        slab.into_host().map_err(|_| in_device_memory())
    }

    fn complete(&mut self, answer: Result<RecordAnswer, TierError>) -> PyResult<()> {
        let call = self.call.take();
        let call = call.ok_or_else(|| PyRuntimeError::new_err("the call was already answered"))?;
        call.into_inner("stage")?.complete(answer);
        Ok(())
    }
}

/// The number of bytes that a `get` returned.
fn count(result: &Bound<'_, PyAny>) -> PyResult<usize> {
    if !result.is_instance_of::<PyBool>()
        && let Ok(bytes) = result.extract()
    {
        return Ok(bytes);
    }
    let class = result.get_type();
    Err(PyTypeError::new_err(format!("get must return the number of copied bytes, not {class}")))
}

/// Runs the conformance checks for stages.
///
/// `make` is called once for each check and must return a new stage without records. Raises
/// `AssertionError` with the first violation.
#[pyfunction]
#[pyo3(signature = (make, /))]
fn check_stage(py: Python<'_>, make: &Bound<'_, PyAny>) -> PyResult<()> {
    if !make.is_callable() {
        return Err(type_error("make", make, "a function that makes a stage"));
    }
    let config = StoreConfig { dram_bytes: 32 << 20, ..StoreConfig::default() };
    let pool = conformance::pool();
    let clock: Arc<dyn cascade_runtime::Clock> = Arc::new(SystemClock);
    let context = StageContext { config: &config, pool: &pool, clock: &clock };
    let made = make.clone().unbind();
    let mut started = Vec::new();
    let checked = py.detach(|| {
        catch_unwind(AssertUnwindSafe(|| {
            conformance::all(&pool, &mut || {
                // The checks cannot return an error, so a failure to open is a panic too.
                open_one(&made, &context, &mut started).expect("a stage that can be opened")
            });
        }))
    });
    for started in &started {
        let calls = started.get().calls.get("stage")?;
        py.detach(|| calls.close());
    }
    checked.map_err(|panic| PyAssertionError::new_err(panic_message(&*panic)))
}

fn open_one(
    make: &Py<PyAny>,
    context: &StageContext<'_>,
    started: &mut Vec<Py<PyStageCalls>>,
) -> Result<Arc<dyn Tier>, String> {
    let (calls, capacity_bytes) = Python::attach(|py| {
        let object = make.bind(py).call0()?;
        let stage = PythonStage::new("checked".to_owned(), object, &StageRegistry::default())?;
        Ok((stage.start(started)?, stage.capacity_bytes))
    })
    .map_err(|error: PyErr| error.to_string())?;
    let stage = RecordStage::open("checked", calls, capacity_bytes, context);
    stage.map_err(|error| cascade_block::with_causes(&error))
}

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a check failed".to_owned())
}
