//! Endpoints and connections of the transport. `cascadekv.transfer` builds on them.

mod rdma;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use cascade_block::with_causes;
use cascade_runtime::{Deadline, Mutex as WaitMutex, MutexGuard as WaitMutexGuard, SystemClock};
use cascade_transport::{
    Access, Batch, Connection, Direction, Endpoint, EndpointConfig, Heartbeat, Listener, Piece,
    Place, RecordLayer, Refusal, RegionId, Ticket, TlsConfig, TlsIdentity, TransportError,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use rdma::{RdmaSettings, RdmaUse};

use crate::arguments::{self, value_error};
use crate::buffers::{region_at, region_of, region_on_gpu};
use crate::errors::{
    AwayError, BusyError, CascadeError, ConfigError, DeadlineError, PoolError, RefusedError,
};
use crate::gpu::dmabuf_of;
use crate::process_bound::{DroppedDetached, ProcessBound};
use crate::waits;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTransportEndpoint>()?;
    module.add_class::<PyTransportConnection>()?;
    module.add_function(wrap_pyfunction!(user_token, module)?)?;
    module.add_class::<PyTransportTicket>()
}

/// The token that processes of this user share on this host; made if there is none.
#[pyfunction]
fn user_token(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
    let token = py.detach(cascade_transport::user_token);
    token.map(|token| PyBytes::new(py, &token)).map_err(|error| to_python(&error))
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
        | TransportError::Address { .. }
        | TransportError::Certificate { .. }
        | TransportError::Tls(_)
        | TransportError::Local { .. }
        | TransportError::TooLarge { .. }
        | TransportError::Unavailable(_) => ConfigError::new_err(message),
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

fn streams_of(given: &Bound<'_, PyAny>) -> PyResult<usize> {
    arguments::count("streams", given)
}

fn heartbeat_of(interval: &Bound<'_, PyAny>, limit: &Bound<'_, PyAny>) -> PyResult<Heartbeat> {
    let interval = arguments::duration("heartbeat", interval)?;
    let limit = arguments::duration("heartbeat", limit)?;
    if interval.is_zero() || limit.is_zero() {
        return Err(ConfigError::new_err("heartbeat: interval and limit must not be 0"));
    }
    Ok(Heartbeat { interval, limit })
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

/// The attributes of `cascadekv.transfer.Tls`.
#[derive(FromPyObject)]
struct TlsSettings {
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    authority: PathBuf,
    client_certificates: bool,
    server_name: Option<String>,
    kernel: bool,
}

impl TlsSettings {
    fn into_config(self) -> PyResult<TlsConfig> {
        let identity = match (self.certificate, self.key) {
            (Some(certificate), Some(key)) => Some(TlsIdentity { certificate, key }),
            (None, None) => None,
            _ => return Err(ConfigError::new_err("tls: give certificate and key, or neither")),
        };
        Ok(TlsConfig {
            identity,
            client_certificates: self.client_certificates,
            server_name: self.server_name,
            kernel: self.kernel,
            ..TlsConfig::anonymous(self.authority)
        })
    }
}

/// One side of connections to other processes: memory that is registered, listeners, notices.
///
/// `accepts` is called with the geometry of each peer and returns `None`, or why it is refused.
#[pyclass(name = "TransportEndpoint", module = "cascadekv", frozen)]
pub(crate) struct PyTransportEndpoint {
    endpoint: ProcessBound<Endpoint>,
    /// How connections over TCP use RDMA, once `use_rdma` was called.
    rdma: OnceLock<RdmaUse>,
    listeners: DroppedDetached<Mutex<Option<Vec<ProcessBound<Listener>>>>>,
}

#[pymethods]
impl PyTransportEndpoint {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    #[pyo3(signature = (*, name = "cascade".to_owned(), geometry = vec![], accepts = None,
                        token = None, tls = None, streams = 1, heartbeat = None))]
    fn new(
        name: String,
        geometry: Vec<u8>,
        accepts: Option<Py<PyAny>>,
        token: Option<&Bound<'_, PyAny>>,
        tls: Option<TlsSettings>,
        #[pyo3(from_py_with = streams_of)] streams: usize,
        heartbeat: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    ) -> PyResult<Self> {
        let token = token.map_or(Ok(None), arguments::token)?;
        let tls = tls.map(TlsSettings::into_config).transpose()?;
        let heartbeat = heartbeat.map(|(interval, limit)| heartbeat_of(&interval, &limit));
        let mut config =
            EndpointConfig { name, geometry, token, tls, streams, ..Default::default() };
        config.limits.heartbeat = heartbeat.transpose()?;
        if let Some(accepts) = accepts {
            config.accepts = Arc::new(move |geometry| refusal_by(&accepts, geometry));
        }
        let endpoint = Endpoint::new(config).map_err(|error| to_python(&error))?;
        let listeners = DroppedDetached::new(Mutex::new(Some(vec![])));
        let (endpoint, rdma) = (ProcessBound::new(endpoint), OnceLock::new());
        Ok(Self { endpoint, rdma, listeners })
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

    /// Registers memory of a GPU by its address. It must stay allocated while `owner` lives.
    #[pyo3(signature = (address, length, *, device, access, owner))]
    fn register_gpu(
        &self,
        address: u64,
        length: usize,
        device: u8,
        #[pyo3(from_py_with = access_of)] access: Access,
        owner: Py<PyAny>,
    ) -> PyResult<u32> {
        let endpoint = self.endpoint()?;
        let memory = dmabuf_of(device, address, length, owner)?;
        let region = region_on_gpu(memory, device, access).map_err(|error| to_python(&error))?;
        let id = endpoint.register(region).map_err(|error| to_python(&error))?;
        Ok(id.0)
    }

    /// Opens an RDMA device, which connections over TCP use from then on; returns its name.
    fn use_rdma(&self, py: Python<'_>, settings: RdmaSettings) -> PyResult<String> {
        let endpoint = self.endpoint()?;
        let how = settings.how()?;
        let device = py.detach(|| settings.open())?;
        let name = device.name().to_owned();
        endpoint.use_device(device).map_err(|error| to_python(&error))?;
        // Set once: a second device was refused above.
        self.rdma.get_or_init(|| how);
        Ok(name)
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
    fn listen(&self, py: Python<'_>, address: &str) -> PyResult<String> {
        let endpoint = self.endpoint()?;
        let refused = |error| to_python(&error);
        let (listener, address) = if let Some(path) = address.strip_prefix("unix:") {
            let listener = py.detach(|| endpoint.listen_unix(Path::new(path)));
            (listener.map_err(refused)?, address.to_owned())
        } else {
            let parsed = address.parse().map_err(|_| {
                let text = format!("address: {address:?} is not an IP address with a port");
                ConfigError::new_err(text)
            })?;
            let listener = py.detach(|| endpoint.listen_tcp(parsed)).map_err(refused)?;
            let address = listener.tcp_address().map(|address| address.to_string());
            (listener, address.unwrap_or_default())
        };
        let listener = ProcessBound::new(listener);
        let unused = match &mut *self.listeners() {
            Some(all) => {
                all.push(listener);
                return Ok(address);
            }
            None => listener,
        };
        // Its threads may wait for the interpreter.
        py.detach(|| drop(unused));
        Err(AwayError::new_err("it is closed"))
    }

    /// Connects to `HOST:PORT` or `unix:PATH`.
    #[pyo3(signature = (address, *, timeout))]
    fn connect(
        &self,
        py: Python<'_>,
        address: &str,
        #[pyo3(from_py_with = timeout_of)] timeout: Deadline,
    ) -> PyResult<PyTransportConnection> {
        let (endpoint, address) = (self.endpoint()?.clone(), address.to_owned());
        let rdma = self.rdma.get().copied();
        let connected = waits::in_thread(py, "transport-connect", move || {
            let without_reason = |connection| (connection, None);
            match (address.strip_prefix("unix:"), rdma) {
                (Some(path), _) => {
                    endpoint.connect_unix(Path::new(path), timeout).map(without_reason)
                }
                (None, None) => endpoint.connect_tcp(address, timeout).map(without_reason),
                (None, Some(RdmaUse::Require)) => {
                    endpoint.connect_rdma(address, timeout).map(without_reason)
                }
                (None, Some(RdmaUse::Prefer)) => endpoint.connect_rdma_or_tcp(address, timeout),
            }
        })?;
        let (connection, no_rdma) = connected.map_err(|error| to_python(&error))?;
        let connection = DroppedDetached::new(ProcessBound::new(connection));
        Ok(PyTransportConnection { connection, no_rdma })
    }

    /// The oldest notice, as the ID of its sender and its bytes; `None` if none arrives in time.
    /// `AwayError` if none waits and the endpoint is closed.
    #[pyo3(signature = (*, timeout))]
    fn next_notice<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = timeout_of)] timeout: Deadline,
    ) -> PyResult<Option<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>> {
        let endpoint = self.endpoint()?;
        let waited = waits::in_parts(py, timeout, |part| match endpoint.next_notice(part) {
            None if self.listeners().is_none() => Some(Err(AwayError::new_err("it is closed"))),
            notice => notice.map(Ok),
        })?;
        let notice = waited.transpose()?;
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
    let reason = Python::try_attach(|py| {
        let answer = accepts.call1(py, (PyBytes::new(py, geometry),));
        answer.and_then(|answer| answer.extract::<Option<String>>(py))
    });
    match reason {
        Some(Ok(None)) => Ok(()),
        Some(Ok(Some(reason))) => Err(reason),
        Some(Err(error)) => Err(format!("its check of the geometry failed: {error}")),
        None => Err("its process is ending".to_owned()),
    }
}

/// A connection to one peer; any number of threads may use it.
#[pyclass(name = "TransportConnection", module = "cascadekv", frozen)]
pub(crate) struct PyTransportConnection {
    connection: DroppedDetached<ProcessBound<Arc<dyn Connection>>>,
    /// Why it does not use RDMA, although its endpoint does.
    no_rdma: Option<String>,
}

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

    /// How the bytes move: `tcp`, `unix`, `shm` or `rdma`.
    #[getter]
    fn transport(&self) -> PyResult<String> {
        Ok(self.connection()?.transport().to_string())
    }

    /// Why bytes move by TCP, although the endpoint has an RDMA device.
    #[getter]
    fn no_rdma(&self) -> Option<&str> {
        self.no_rdma.as_deref()
    }

    /// What encrypts the connection: `"kernel"` or `"userspace"`; `None` without TLS.
    #[getter]
    fn tls(&self) -> PyResult<Option<&'static str>> {
        Ok(self.connection()?.peer().tls.map(|layer| match layer {
            RecordLayer::Kernel => "kernel",
            RecordLayer::Userspace => "userspace",
        }))
    }

    /// Whether batches can be posted.
    #[getter]
    fn is_open(&self, py: Python<'_>) -> PyResult<bool> {
        let connection = self.connection()?;
        Ok(py.detach(|| connection.is_open()))
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
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let connection = self.connection()?;
        py.detach(|| connection.close());
        Ok(())
    }
}

impl PyTransportConnection {
    fn connection(&self) -> PyResult<&Arc<dyn Connection>> {
        self.connection.get("connection")
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
        let connection = DroppedDetached::new(ProcessBound::new(Arc::clone(connection)));
        let ticket = DroppedDetached::new(WaitMutex::new(Some(ProcessBound::new(ticket))));
        Ok(PyTransportTicket { ticket, is_cancelled: AtomicBool::new(false), connection })
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
pub(crate) struct PyTransportTicket {
    /// Held by the thread that waits. `None` after a cancellation.
    ticket: DroppedDetached<WaitMutex<Option<ProcessBound<Ticket>>>>,
    is_cancelled: AtomicBool,
    connection: DroppedDetached<ProcessBound<Arc<dyn Connection>>>,
}

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
        self.connection.get("ticket")?;
        let ended = waits::in_parts(py, timeout, |part| {
            // The lock is free between parts: another thread may cancel the batch.
            let mut ticket = self.lock(part)?;
            let waited = match &mut *ticket {
                Some(ticket) if !self.is_cancelled.load(Ordering::Acquire) => {
                    ticket.get_mut("ticket").map(|ticket| ticket.wait(part))
                }
                _ => Err(CascadeError::new_err("the batch was cancelled")),
            };
            match waited {
                Ok(Err(TransportError::Deadline { .. })) => None,
                Ok(ended) => Some(ended.map_err(|error| to_python(&error))),
                Err(error) => Some(Err(error)),
            }
        })?;
        ended.unwrap_or_else(|| Err(to_python(&TransportError::Deadline { what: "a batch" })))
    }

    /// Ends the batch: afterwards its local memory is no longer accessed. A connection that does
    /// not answer in time is closed for that.
    #[pyo3(signature = (*, timeout))]
    fn cancel(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = timeout_of)] timeout: Deadline,
    ) -> PyResult<()> {
        let connection = self.connection.get("ticket")?;
        // A thread that waits for the batch leaves at the next part of its wait.
        self.is_cancelled.store(true, Ordering::Release);
        let until = timeout.max(deadline_in(2 * waits::PART));
        py.detach(|| {
            let mut ticket = self.lock(until).unwrap_or_else(|| {
                // It has not left in time: it does when the connection ends.
                connection.close();
                self.ticket.lock().unwrap_or_else(PoisonError::into_inner)
            });
            match ticket.take() {
                Some(ticket) => {
                    ticket.into_inner("ticket")?.cancel(timeout);
                    Ok(())
                }
                None => Ok(()),
            }
        })
    }
}

impl PyTransportTicket {
    fn lock(&self, deadline: Deadline) -> Option<WaitMutexGuard<'_, Option<ProcessBound<Ticket>>>> {
        let locked = self.ticket.lock_until(deadline, &SystemClock);
        locked.map(|locked| locked.unwrap_or_else(PoisonError::into_inner))
    }
}
