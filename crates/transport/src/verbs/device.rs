//! An open RDMA device: its context, a protection domain, and the port and GID that are used.
#![expect(unsafe_code, reason = "calls libibverbs")]

use std::ffi::{CStr, c_int};
use std::io;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::abi::{Context, DeviceState, Opaque, PORT_ACTIVE, PortState};
use super::choice::{Target, choose_gid, nearest};
use super::error::{Unavailable, VerbsError};
use super::functions::Verbs;
use super::settings::VerbsSettings;
use super::sysfs::{DeviceFacts, Gid, LinkLayer, PortFacts, read_devices};

/// The hops that a packet may take.
pub(super) const HOP_LIMIT: u8 = 64;

/// An open device.
#[derive(Debug)]
pub struct Device {
    pub(super) verbs: Arc<Verbs>,
    pub(super) context: NonNull<Context>,
    pub(super) domain: NonNull<Opaque>,
    pub(super) settings: VerbsSettings,
    pub(super) port: PortFacts,
    pub(super) gid: Gid,
    pub(super) local_id: u16,
    pub(super) mtu: u8,
    pub(super) requests_max: usize,
    /// Reads of a peer that a queue pair serves at a time.
    pub(super) reads_max: u8,
    /// Reads that a queue pair starts at a time.
    pub(super) initiated_reads_max: u8,
    message_bytes_max: u32,
    name: String,
}

// SAFETY: libibverbs allows calls from any thread; the pointers are closed once, by `drop`.
unsafe impl Send for Device {}
// SAFETY: calls of libibverbs on one context from several threads are allowed.
unsafe impl Sync for Device {}

impl Device {
    /// Opens the nearest device to a target that has an active port and a usable GID.
    ///
    /// # Errors
    /// If there is none.
    pub fn open_nearest(
        verbs: &Arc<Verbs>,
        sysfs: &Path,
        target: &Target,
        settings: &VerbsSettings,
    ) -> Result<Arc<Self>, VerbsError> {
        let devices = read_devices(sysfs);
        let near = nearest(&devices, target, settings)?;
        // At least one: without any, `nearest` is an error.
        let first = near.first().ok_or(Unavailable::NoDevice)?;
        Self::open(verbs, first, settings)
    }

    /// Opens a device.
    ///
    /// # Errors
    /// If it cannot be opened, or has no active port with a usable GID.
    pub fn open(
        verbs: &Arc<Verbs>,
        facts: &DeviceFacts,
        settings: &VerbsSettings,
    ) -> Result<Arc<Self>, VerbsError> {
        settings.check()?;
        let device = &facts.name;
        let port = facts.ports.iter().find(|port| port.is_active);
        let port = port.ok_or_else(|| Unavailable::NoPort { device: device.clone() })?;
        let gid = choose_gid(port, settings.gid_index)
            .ok_or_else(|| Unavailable::NoGid { device: device.clone(), port: port.number })?;
        let opened = Opened::open(verbs, device)?;
        let state = opened.query_device()?;
        let port_state = opened.query_port(port.number)?;
        if port_state.state != PORT_ACTIVE {
            return Err(Unavailable::NoPort { device: device.clone() }.into());
        }
        let domain = opened.domain()?;
        let small = |number: c_int| u8::try_from(number.clamp(0, 255)).unwrap_or(u8::MAX);
        let context = opened.context;
        // From here on the device closes the context.
        opened.disarm();
        Ok(Arc::new(Self {
            verbs: Arc::clone(verbs),
            context,
            domain,
            settings: settings.clone(),
            port: port.clone(),
            gid,
            local_id: port_state.local_id,
            mtu: small(port_state.mtu),
            requests_max: usize::try_from(state.requests_max).unwrap_or(0),
            reads_max: small(state.reads_max),
            initiated_reads_max: small(state.initiated_reads_max),
            message_bytes_max: port_state.message_bytes_max,
            name: device.clone(),
        }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The GID that its packets carry.
    pub fn gid(&self) -> Gid {
        self.gid
    }

    /// The longest piece that one work request moves.
    pub fn message_bytes_max(&self) -> u32 {
        self.message_bytes_max
    }

    /// Whether packets carry the GID and not only a local ID.
    pub(super) fn has_global_path(&self) -> bool {
        self.port.link_layer == LinkLayer::Ethernet || self.settings.gid_index.is_some()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: the domain is deallocated once. Registered memory and links hold the device.
        let _is_deallocated = unsafe { (self.verbs.functions.dealloc_pd)(self.domain.as_ptr()) };
        // SAFETY: the context is closed once, after all that was made of it.
        let _is_closed = unsafe { (self.verbs.functions.close_device)(self.context.as_ptr()) };
    }
}

/// The error of a call that has just failed and set the error number.
pub(super) fn failed(call: &'static str) -> VerbsError {
    VerbsError::Call { call, code: io::Error::last_os_error().raw_os_error().unwrap_or(0) }
}

/// The result of a call that returns an error number.
pub(super) fn checked(call: &'static str, code: c_int) -> Result<(), VerbsError> {
    // Some providers return -1 and set the error number.
    match code {
        0 => Ok(()),
        code if code > 0 => Err(VerbsError::Call { call, code }),
        _ => Err(failed(call)),
    }
}

/// A context that is closed on an error.
struct Opened<'a> {
    verbs: &'a Verbs,
    context: NonNull<Context>,
    is_armed: bool,
}

impl<'a> Opened<'a> {
    fn open(verbs: &'a Verbs, name: &str) -> Result<Self, VerbsError> {
        let mut count = 0;
        // SAFETY: the library allocates a list of `count` devices, ended by null.
        let list = unsafe { (verbs.functions.get_device_list)(&raw mut count) };
        let list = NonNull::new(list).ok_or_else(|| failed("ibv_get_device_list"))?;
        let opened = Self::open_listed(verbs, list, count, name);
        // SAFETY: the list was allocated above; an open context does not need it.
        unsafe { (verbs.functions.free_device_list)(list.as_ptr()) };
        Ok(Self { verbs, context: opened?, is_armed: true })
    }

    fn open_listed(
        verbs: &Verbs,
        list: NonNull<*mut Opaque>,
        count: c_int,
        name: &str,
    ) -> Result<NonNull<Context>, VerbsError> {
        let mut present = Vec::new();
        for at in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` entries.
            let entry = unsafe { list.add(at) };
            // SAFETY: an entry of the list, which is not freed yet.
            let device = unsafe { entry.read() };
            // SAFETY: a device of the list.
            let text = unsafe { (verbs.functions.get_device_name)(device) };
            // SAFETY: a string in the device, which lives as long as the list.
            let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
            if text == name {
                // SAFETY: a device of the list.
                let context = unsafe { (verbs.functions.open_device)(device) };
                return NonNull::new(context).ok_or_else(|| failed("ibv_open_device"));
            }
            present.push(text);
        }
        Err(Unavailable::NoSuchDevice { name: name.to_owned(), present }.into())
    }

    fn query_device(&self) -> Result<DeviceState, VerbsError> {
        // SAFETY: the structure has only numbers, for which zero is valid.
        let mut state: DeviceState = unsafe { std::mem::zeroed() };
        let context = self.context.as_ptr();
        // SAFETY: the context is open, and the structure has the library's layout.
        let code =
            unsafe { (self.verbs.functions.query_device)(context, ptr::from_mut(&mut state)) };
        checked("ibv_query_device", code).map(|()| state)
    }

    fn query_port(&self, port: u8) -> Result<PortState, VerbsError> {
        let mut state = PortState::default();
        let context = self.context.as_ptr();
        // SAFETY: the context is open. The structure is at least as long as the library's.
        let code =
            unsafe { (self.verbs.functions.query_port)(context, port, ptr::from_mut(&mut state)) };
        checked("ibv_query_port", code).map(|()| state)
    }

    fn domain(&self) -> Result<NonNull<Opaque>, VerbsError> {
        // SAFETY: the context is open.
        let domain = unsafe { (self.verbs.functions.alloc_pd)(self.context.as_ptr()) };
        NonNull::new(domain).ok_or_else(|| failed("ibv_alloc_pd"))
    }

    fn disarm(mut self) {
        self.is_armed = false;
    }
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        if self.is_armed {
            // SAFETY: the context was opened above, and nothing was made of it.
            let _is_closed = unsafe { (self.verbs.functions.close_device)(self.context.as_ptr()) };
        }
    }
}
