//! Connections to a node.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cascade_client::{Access, Client, ConnectOptions, SOCKET_PATH_BYTES_MAX, socket_of_process};
use cascade_store::StoreError;
use pyo3::prelude::*;

use crate::arguments::{self, of};
use crate::errors::{AwayError, ConfigError, to_python};
use crate::gpu::PyGpu;
use crate::store::PyStore;

/// Default time-out of a call.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(connect, module)?)
}

/// Connects to the node on this host. Returns a `Store` with the same methods as an embedded one.
///
/// `socket` is the path of the node's Unix socket, or `unix:PATH`. Its default is the value of
/// `CASCADE_NODE` or `CASCADE_SOCKET`, else the default of `cascade serve` for this user. `token`
/// is the token of a tenant. `access` is "write" or "read". `name` is shown in the node's status.
/// `timeout` is the default time-out of calls. `gpu` is a `Gpu`: it maps the pool of a node whose
/// blocks are in the memory of a GPU (`docs/gpu.md`), of this one or of one that it can access;
/// other nodes are refused with it.
///
/// Raises `AwayError` if no node answers, and `RefusedError` if the node refuses this client. After
/// that, calls return at once while the node is unavailable: reads miss and puts return `failed`.
/// The client reconnects by itself.
#[pyfunction]
#[pyo3(signature = (
    socket = None, *, token = None, access = Access::Write, name = None, timeout = None, gpu = None
))]
#[pyo3(text_signature = "(socket=None, *, token=None, access='write', name=None, timeout=5.0, \
                         gpu=None)")]
#[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
fn connect(
    py: Python<'_>,
    socket: Option<&Bound<'_, PyAny>>,
    #[pyo3(from_py_with = arguments::token)] token: Option<Vec<u8>>,
    #[pyo3(from_py_with = access_of)] access: Access,
    #[pyo3(from_py_with = of::name)] name: Option<String>,
    #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    gpu: Option<PyRef<'_, PyGpu>>,
) -> PyResult<PyStore> {
    let socket = match socket {
        Some(given) => socket_path(arguments::path("socket", given)?)?,
        None => socket_of_process(),
    };
    check_length(&socket)?;
    let mut options = ConnectOptions::new(socket);
    options.access = access;
    options.token = token;
    options.name = name.unwrap_or(options.name);
    options.timeout = timeout.unwrap_or(TIMEOUT);
    options.devices = gpu.map(|gpu| gpu.importer());
    let place = options.socket.display().to_string();
    let wants_device = options.devices.is_some();
    let client = py.detach(|| Client::connect(options)).map_err(|error| match error {
        StoreError::Unavailable { .. } => AwayError::new_err(format!(
            "{error}; start a node with `cascade serve --socket {place}`, or connect to the socket \
             that a running node prints in its line with `ready`"
        )),
        _ => to_python(&error),
    })?;
    let is_on_host = client.welcome().is_some_and(|welcome| welcome.device.is_none());
    if wants_device && is_on_host {
        return Err(ConfigError::new_err(format!(
            "gpu: the node at {place} keeps its blocks in DRAM; leave gpu out, or connect to a \
             node that was started with --gpu"
        )));
    }
    Ok(PyStore::of_client(Arc::new(client), format!("served at {place}")))
}

/// The socket that `connect` uses by default.
#[pyfunction]
pub(crate) fn default_socket() -> PathBuf {
    socket_of_process()
}

fn access_of(given: &Bound<'_, PyAny>) -> PyResult<Access> {
    match &*arguments::text("access", given)? {
        "write" => Ok(Access::Write),
        "read" => Ok(Access::Read),
        _ => Err(arguments::value_error("access", given, "\"write\" or \"read\"")),
    }
}

/// The path of the socket without `unix:`. Refuses network addresses.
fn socket_path(given: PathBuf) -> PyResult<PathBuf> {
    let Some(text) = given.to_str() else { return Ok(given) };
    if let Some(path) = text.strip_prefix("unix:") {
        return Ok(PathBuf::from(path));
    }
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let has_port = text.rsplit_once(':').is_some_and(|(_, port)| is_port(port));
    if text.contains("://") || (has_port && !text.contains('/')) {
        return Err(ConfigError::new_err(format!(
            "socket: {text:?} is a network address, but a client shares memory with a node on the \
             same host; give the path of the node's Unix socket, such as {}",
            cascade_client::default_socket().display()
        )));
    }
    Ok(given)
}

fn check_length(socket: &Path) -> PyResult<()> {
    let bytes = socket.as_os_str().len();
    if bytes <= SOCKET_PATH_BYTES_MAX {
        return Ok(());
    }
    Err(ConfigError::new_err(format!(
        "socket: a path of {bytes} bytes is too long for a Unix socket; give one of at most \
         {SOCKET_PATH_BYTES_MAX}"
    )))
}
