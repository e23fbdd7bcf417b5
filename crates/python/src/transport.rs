//! Endpoints and connections of the transport. `cascadekv.transfer` builds on them.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::with_causes;
use cascade_runtime::{Deadline, SystemClock};
use cascade_transport::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Listener, Piece, Place,
    Refusal, RegionId, Ticket, TransportError,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::{self, value_error};
use crate::buffers::{region_at, region_of};
use crate::errors::{
    AwayError, BusyError, CascadeError, ConfigError, DeadlineError, PoolError, RefusedError,
};
use crate::process_bound::ProcessBound;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTransportEndpoint>()?;
    module.add_class::<PyTransportConnection>()?;
    module.add_class::<PyTransportTicket>()
}

/// The exception for an error of the transport.
fn to_python(error: &TransportError) -> PyErr {
    let message = with_causes(error);
    match error {
        TransportError::Deadline { .. } => DeadlineError::new_err(message),
        TransportError::Connect { .. } | TransportError::Lost { .. } => AwayError::new_err(message),
        TransportError::Refused { refusal: Refusal::Busy, .. } | TransportError::InUse(_) => {
            BusyError::new_err(message)
        }
        TransportError::Handshake { .. } | TransportError::Refused { .. } => {
            RefusedError::new_err(message)
        }
        TransportError::Listen { .. }
        | TransportError::Local { .. }
        | TransportError::TooLarge { .. } => ConfigError::new_err(message),
        TransportError::Memory { .. } => PoolError::new_err(message),
        _ => CascadeError::new_err(message),
    }
}

fn deadline_in(timeout: Duration) -> Deadline {
    Deadline::after(&SystemClock, timeout)
}

fn timeout_of(given: &Bound<'_, PyAny>) -> PyResult<Deadline> {
    arguments::duration("timeout", given).map(deadline_in)
}

fn access_of(given: &Bound<'_, PyAny>) -> PyResult<Access> {
    match &*arguments::text("access", given)? {
        "local" => Ok(Access::LOCAL),
        "read" => Ok(Access::READ),
        "write" => Ok(Access::WRITE),
        "both" => Ok(Access::BOTH),
        _ => Err(value_error("access", given, "\"local\", \"read\", \"write\" or \"both\"")),
    }
}

fn access_name(access: Access) -> &'static str {
    match (access.read, access.write) {
        (false, false) => "local",
        (true, false) => "read",
        (false, true) => "write",
        (true, true) => "both",
    }
}

/// One side of connections to other processes: memory that is registered, listeners, notices.
///
/// `accepts` is called with the geometry of each peer and returns `None`, or why it is refused.
#[pyclass(name = "TransportEndpoint", module = "cascadekv", frozen)]
pub(crate) struct PyTransportEndpoint {
    endpoint: ProcessBound<Endpoint>,
    listeners: Mutex<Option<Vec<ProcessBound<Listener>>>>,
}

#[pymethods]
impl PyTransportEndpoint {
    #[new]
    #[pyo3(signature = (*, name = "cascade".to_owned(), geometry = vec![], accepts = None,
                        token = None))]
    fn new(
        name: String,
        geometry: Vec<u8>,
        accepts: Option<Py<PyAny>>,
        token: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let token = token.map_or(Ok(None), arguments::token)?;
        let mut config = EndpointConfig { name, geometry, token, ..Default::default() };
        if let Some(accepts) = accepts {
            config.accepts = Arc::new(move |geometry| refusal_by(&accepts, geometry));
        }
        let endpoint = Endpoint::new(config).map_err(|error| to_python(&error))?;
        let listeners = Mutex::new(Some(vec![]));
        Ok(Self { endpoint: ProcessBound::new(endpoint), listeners })
    }

    /// Identifies the endpoint: 16 random bytes.
    #[getter]
    fn id<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.endpoint()?.id().0))
    }

    /// Registers a writable buffer and returns the number of its region.
    #[pyo3(signature = (memory, *, access))]
    fn register(
        &self,
        memory: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = access_of)] access: Access,
    ) -> PyResult<u32> {
        let region = region_of(memory, access)?;
        let id = self.endpoint()?.register(region).map_err(|error| to_python(&error))?;
        Ok(id.0)
    }

    /// Registers memory by its address. It must stay mapped while `owner` lives.
    #[pyo3(signature = (address, length, *, access, owner))]
    fn register_address(
        &self,
        address: usize,
        length: usize,
        #[pyo3(from_py_with = access_of)] access: Access,
        owner: Py<PyAny>,
    ) -> PyResult<u32> {
        let region = region_at(address, length, access, owner)?;
        let id = self.endpoint()?.register(region).map_err(|error| to_python(&error))?;
        Ok(id.0)
    }

    /// Removes a region, and waits until no batch uses it.
    #[pyo3(signature = (region, *, timeout))]
    fn unregister(
        &self,
        py: Python<'_>,
        region: u32,
        #[pyo3(from_py_with = timeout_of)] timeout: Deadline,
    ) -> PyResult<()> {
        let endpoint = self.endpoint()?;
        let removed = py.detach(|| endpoint.unregister(RegionId(region), timeout));
        removed.map_err(|error| to_python(&error))
    }

    /// Listens on `HOST:PORT` or `unix:PATH`; returns the address with its port.
    fn listen(&self, address: &str) -> PyResult<String> {
        let endpoint = self.endpoint()?;
        let mut listeners = self.listeners();
        let all = listeners.as_mut().ok_or_else(|| AwayError::new_err("it is closed"))?;
        let refused = |error| to_python(&error);
        let (listener, address) = if let Some(path) = address.strip_prefix("unix:") {
            (endpoint.listen_unix(Path::new(path)).map_err(refused)?, address.to_owned())
        } else {
            let parsed = address.parse().map_err(|_| {
                let text = format!("address: {address:?} is not an IP address with a port");
                ConfigError::new_err(text)
            })?;
            let listener = endpoint.listen_tcp(parsed).map_err(refused)?;
            let address = listener.tcp_address().map(|address| address.to_string());
            (listener, address.unwrap_or_default())
        };
        all.push(ProcessBound::new(listener));
        Ok(address)
    }

    /// Connects to `HOST:PORT` or `unix:PATH`.
    #[pyo3(signature = (address, *, timeout))]
    fn connect(
        &self,
        py: Python<'_>,
        address: &str,
        #[pyo3(from_py_with = timeout_of)] timeout: Deadline,
    ) -> PyResult<PyTransportConnection> {
        let endpoint = self.endpoint()?;
        let connected = py.detach(|| match address.strip_prefix("unix:") {
            Some(path) => endpoint.connect_unix(Path::new(path), timeout),
            None => endpoint.connect_tcp(address, timeout),
        });
        let connection = connected.map_err(|error| to_python(&error))?;
        Ok(PyTransportConnection(ProcessBound::new(connection)))
    }

    /// The oldest notice, as the ID of its sender and its bytes; `None` if none arrives in time.
    #[pyo3(signature = (*, timeout))]
    fn next_notice<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = timeout_of)] timeout: Deadline,
    ) -> PyResult<Option<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>> {
        let endpoint = self.endpoint()?;
        let notice = py.detach(|| endpoint.next_notice(timeout));
        Ok(notice.map(|it| (PyBytes::new(py, &it.from.0), PyBytes::new(py, &it.bytes))))
    }

    /// Peers that are connected to the listeners.
    #[getter]
    fn peer_count(&self) -> PyResult<usize> {
        self.endpoint()?;
        let listeners = self.listeners();
        let all = listeners.as_deref().unwrap_or_default();
        all.iter().map(|it| Ok(it.get("endpoint")?.peer_count())).sum()
    }

    /// Ends the listeners and the connections that they accepted.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.endpoint()?;
        let listeners = self.listeners().take();
        py.detach(|| drop(listeners));
        Ok(())
    }
}

impl PyTransportEndpoint {
    fn endpoint(&self) -> PyResult<&Endpoint> {
        self.endpoint.get("endpoint")
    }

    fn listeners(&self) -> MutexGuard<'_, Option<Vec<ProcessBound<Listener>>>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks a Python callable whether a geometry is accepted.
fn refusal_by(accepts: &Py<PyAny>, geometry: &[u8]) -> Result<(), String> {
    Python::attach(|py| {
        let answer = accepts.call1(py, (PyBytes::new(py, geometry),));
        let reason = answer.and_then(|answer| answer.extract::<Option<String>>(py));
        match reason {
            Ok(None) => Ok(()),
            Ok(Some(reason)) => Err(reason),
            Err(error) => Err(format!("its check of the geometry failed: {error}")),
        }
    })
}

/// A connection to one peer; any number of threads may use it.
#[pyclass(name = "TransportConnection", module = "cascadekv", frozen)]
pub(crate) struct PyTransportConnection(ProcessBound<Arc<dyn Connection>>);

#[pymethods]
impl PyTransportConnection {
    /// Identifies the peer's endpoint.
    #[getter]
    fn peer_id<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.connection()?.peer().id.0))
    }

    /// What the peer said of its regions.
    #[getter]
    fn geometry<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.connection()?.peer().geometry))
    }

    /// The peer's regions when the connection was made: number, bytes, access.
    #[getter]
    fn regions(&self) -> PyResult<Vec<(u32, u64, &'static str)>> {
        let regions = self.connection()?.peer().regions.iter();
        Ok(regions.map(|it| (it.id.0, it.bytes, access_name(it.access))).collect())
    }

    /// Whether batches can be posted.
    #[getter]
    fn is_open(&self) -> PyResult<bool> {
        Ok(self.connection()?.is_open())
    }

    /// Starts to write to the peer. `runs` has `(local region, offset, stride, remote region,
    /// offset, stride, bytes)`; each moves these bytes of every pair of blocks.
    #[pyo3(signature = (runs, local_and_remote_blocks, *, notice = None, timeout))]
    fn write(
        &self,
        py: Python<'_>,
        runs: Vec<Run>,
        local_and_remote_blocks: BlockLists,
        notice: Option<Vec<u8>>,
        #[pyo3(from_py_with = timeout_of)] timeout: Deadline,
    ) -> PyResult<PyTransportTicket> {
        let pieces = pieces(&runs, &local_and_remote_blocks)?;
        let notice = notice.as_deref();
        let batch = Batch { direction: Direction::Write, pieces: &pieces, notice };
        self.post(py, &batch, timeout)
    }

    /// Starts to read from the peer, with the arguments of `write`.
    #[pyo3(signature = (runs, local_and_remote_blocks, *, notice = None, timeout))]
    fn read(
        &self,
        py: Python<'_>,
        runs: Vec<Run>,
        local_and_remote_blocks: BlockLists,
        notice: Option<Vec<u8>>,
        #[pyo3(from_py_with = timeout_of)] timeout: Deadline,
    ) -> PyResult<PyTransportTicket> {
        let pieces = pieces(&runs, &local_and_remote_blocks)?;
        let notice = notice.as_deref();
        let batch = Batch { direction: Direction::Read, pieces: &pieces, notice };
        self.post(py, &batch, timeout)
    }

    /// Closes the connection. Batches that are not confirmed fail.
    fn close(&self) -> PyResult<()> {
        self.connection()?.close();
        Ok(())
    }
}

impl PyTransportConnection {
    fn connection(&self) -> PyResult<&Arc<dyn Connection>> {
        self.0.get("connection")
    }

    fn post(
        &self,
        py: Python<'_>,
        batch: &Batch<'_>,
        timeout: Deadline,
    ) -> PyResult<PyTransportTicket> {
        let connection = self.connection()?;
        let posted = py.detach(|| connection.post(batch, timeout));
        let ticket = posted.map_err(|error| to_python(&error))?;
        Ok(PyTransportTicket(Mutex::new(Some(ProcessBound::new(ticket)))))
    }
}

/// Local region, offset and stride; remote region, offset and stride; bytes.
type Run = (u32, u64, u64, u32, u64, u64, u64);

/// Blocks of this process, and of the peer.
type BlockLists = (Vec<u64>, Vec<u64>);

/// The pieces of all blocks of all runs.
fn pieces(runs: &[Run], (local, remote): &BlockLists) -> PyResult<Vec<Piece>> {
    if local.len() != remote.len() {
        let (local, remote) = (local.len(), remote.len());
        let text = format!("there are {local} local blocks and {remote} remote blocks");
        return Err(ConfigError::new_err(text));
    }
    let place = |region, offset: u64, stride: u64, block: u64| {
        let offset = block.checked_mul(stride).and_then(|at| at.checked_add(offset));
        let far = || ConfigError::new_err(format!("block {block} is beyond all memory"));
        Ok::<_, PyErr>(Place { region: RegionId(region), offset: offset.ok_or_else(far)? })
    };
    let mut pieces = Vec::with_capacity(runs.len() * local.len());
    for (here, offset, stride, there, remote_offset, remote_stride, bytes) in runs {
        for (local, remote) in local.iter().zip(remote) {
            pieces.push(Piece {
                local: place(*here, *offset, *stride, *local)?,
                remote: place(*there, *remote_offset, *remote_stride, *remote)?,
                bytes: *bytes,
            });
        }
    }
    Ok(pieces)
}

/// A batch that was posted.
#[pyclass(name = "TransportTicket", module = "cascadekv", frozen)]
pub(crate) struct PyTransportTicket(Mutex<Option<ProcessBound<Ticket>>>);

#[pymethods]
impl PyTransportTicket {
    /// Waits until the batch has ended. After `DeadlineError` it goes on, and may be waited for
    /// again.
    #[pyo3(signature = (*, timeout))]
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = timeout_of)] timeout: Deadline,
    ) -> PyResult<()> {
        py.detach(|| match &mut *self.ticket() {
            Some(ticket) => {
                ticket.get_mut("ticket")?.wait(timeout).map_err(|error| to_python(&error))
            }
            None => Err(CascadeError::new_err("the batch was cancelled")),
        })
    }

    /// Ends the batch: afterwards its local memory is no longer accessed. A connection that does
    /// not answer in time is closed for that.
    #[pyo3(signature = (*, timeout))]
    fn cancel(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = timeout_of)] timeout: Deadline,
    ) -> PyResult<()> {
        py.detach(|| match self.ticket().take() {
            Some(ticket) => {
                ticket.into_inner("ticket")?.cancel(timeout);
                Ok(())
            }
            None => Ok(()),
        })
    }
}

impl PyTransportTicket {
    fn ticket(&self) -> MutexGuard<'_, Option<ProcessBound<Ticket>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
