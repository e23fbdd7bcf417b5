//! The Python module `cascadekv._native`: converts, calls the store, maps errors, decides nothing.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 hands arguments over by value")]
#![expect(clippy::unused_self, reason = "Python's protocols pass self, needed or not")]

mod buffers;
mod changes;
mod config;
mod errors;
mod hints;
mod keys;
mod namespace;
mod owned;
mod paged;
mod prepared;
mod results;
mod stats;
mod store;
mod view;

use std::ffi::OsString;

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
    module.add_function(wrap_pyfunction!(config::parse_size, module)?)?;
    module.add_function(wrap_pyfunction!(config::check_config, module)?)?;
    module.add_function(wrap_pyfunction!(run_command, module)?)
}

/// Runs the command `cascade` with these arguments, the program's name first.
///
/// Returns its exit code.
#[pyfunction]
#[pyo3(signature = (arguments, /))]
fn run_command(py: Python<'_>, arguments: Vec<OsString>) -> i32 {
    py.detach(|| cascade_bench::cli::main(arguments.into_iter()))
}
