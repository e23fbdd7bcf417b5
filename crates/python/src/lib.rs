//! The Python module `cascadekv._native`: converts arguments, calls the store and maps errors.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 passes arguments by value")]
#![expect(clippy::unused_self, reason = "Python's protocols require self")]

mod arguments;
mod buffers;
mod chain_keys;
mod changes;
mod config;
mod connect;
mod errors;
mod gpu;
mod gpu_memory;
mod gpu_report;
mod hints;
mod keys;
mod namespace;
mod page_table;
mod paged;
mod process_bound;
mod results;
mod stages;
mod stats;
mod store;
mod text_keys;
mod transport;
mod view;
mod waits;

use cascade_client::TraceContext;
use pyo3::prelude::*;

/// The native part of `cascadekv`. Import `cascadekv` instead.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    // Benchmarks report nothing then.
    module.add("has_debug_assertions", cfg!(debug_assertions))?;
    keys::register(module)?;
    text_keys::register(module)?;
    chain_keys::register(module)?;
    namespace::register(module)?;
    results::register(module)?;
    changes::register(module)?;
    buffers::register(module)?;
    view::register(module)?;
    paged::register(module)?;
    gpu::register(module)?;
    store::register(module)?;
    connect::register(module)?;
    stages::register(module)?;
    transport::register(module)?;
    module.add_function(wrap_pyfunction!(config::check_config, module)?)?;
    module.add_function(wrap_pyfunction!(connect::default_socket, module)?)?;
    module.add_function(wrap_pyfunction!(replace_trace, module)?)
}

/// Sets the trace of this thread's calls to nodes: a `traceparent` header, or `None`. Returns the
/// previous value, which the caller must restore.
#[pyfunction]
#[pyo3(signature = (traceparent, /))]
fn replace_trace(
    #[pyo3(from_py_with = arguments::of::traceparent)] traceparent: Option<String>,
) -> Option<String> {
    let context = traceparent.as_deref().and_then(TraceContext::parse);
    cascade_client::replace_trace(context).map(|previous| previous.to_string())
}
