//! The Python module `cascadekv._native`: converts, calls the store, maps errors, decides nothing.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 hands arguments over by value")]
#![expect(clippy::unused_self, reason = "Python's protocols pass self, needed or not")]

mod arguments;
mod buffers;
mod changes;
mod config;
mod connect;
mod errors;
mod hints;
mod keys;
mod namespace;
mod owned;
mod paged;
mod prepared;
mod results;
mod stages;
mod stats;
mod store;
mod view;

use std::ffi::OsString;
use std::path::PathBuf;

use cascade_client::TraceContext;
use pyo3::prelude::*;

/// Keys, results and the store itself; `cascadekv` is what to import.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    keys::register(module)?;
    namespace::register(module)?;
    results::register(module)?;
    changes::register(module)?;
    buffers::register(module)?;
    view::register(module)?;
    paged::register(module)?;
    prepared::register(module)?;
    store::register(module)?;
    connect::register(module)?;
    stages::register(module)?;
    module.add_function(wrap_pyfunction!(config::check_config, module)?)?;
    module.add_function(wrap_pyfunction!(connect::default_socket, module)?)?;
    module.add_function(wrap_pyfunction!(replace_trace, module)?)?;
    module.add_function(wrap_pyfunction!(run_command, module)?)
}

/// Has this thread's calls of nodes be part of the trace that a `traceparent` header names, or of
/// none. Returns what was before, which the caller has to put back.
#[pyfunction]
#[pyo3(signature = (traceparent, /))]
fn replace_trace(
    #[pyo3(from_py_with = arguments::of::traceparent)] traceparent: Option<String>,
) -> Option<String> {
    let context = traceparent.as_deref().and_then(TraceContext::parse);
    cascade_client::replace_trace(context).map(|before| before.to_string())
}

/// Runs the command `cascade` with these arguments, the program's name first.
///
/// What measures an engine runs in this interpreter where it has one. Returns the exit code.
#[pyfunction]
#[pyo3(signature = (arguments, /))]
fn run_command(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<i32> {
    let interpreter: Option<PathBuf> = py.import("sys")?.getattr("executable")?.extract()?;
    Ok(py.detach(|| cascade_bench::cli::main(arguments.into_iter(), interpreter)))
}
