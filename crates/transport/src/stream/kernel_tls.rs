//! TLS in the kernel (`tls.ko`): gives it the keys of a socket, and moves the records that carry no
//! bytes of the caller's.
#![expect(unsafe_code, reason = "options and messages of sockets that no crate wraps")]

use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::AsRawFd as _;
use std::ptr;

use libc::{c_int, c_void, socklen_t, tls12_crypto_info_aes_gcm_128 as CryptoInfo};

use super::kernel::KernelSocket;

/// Room for the control message that carries the type of a record, aligned as one.
type Control = [u64; 8];
const ALERT: u8 = 21;

/// A direction of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) enum TlsDirection {
    Send,
    Receive,
}

impl TlsDirection {
    fn option(self) -> c_int {
        match self {
            Self::Send => libc::TLS_TX,
            Self::Receive => libc::TLS_RX,
        }
    }
}

/// A key of AES-128-GCM, and how many records it has encrypted.
pub(super) struct RecordKey {
    pub(super) key: [u8; 16],
    pub(super) iv: [u8; 12],
    pub(super) sequence: u64,
}

impl KernelSocket {
    /// Prepares the socket for TLS, which changes nothing yet. False without TLS in the kernel.
    pub(super) fn attach_tls(&self) -> bool {
        let name = c"tls".to_bytes();
        // SAFETY: the kernel reads the bytes of the name during the call.
        let result = unsafe {
            libc::setsockopt(
                self.raw(),
                libc::SOL_TCP,
                libc::TCP_ULP,
                name.as_ptr().cast(),
                length_of(name.len()),
            )
        };
        result == 0
    }

    /// Encrypts or decrypts with a key from here on.
    pub(super) fn set_tls_key(&self, direction: TlsDirection, key: &RecordKey) -> io::Result<()> {
        let (salt, iv) = key.iv.split_at(4);
        let info = CryptoInfo {
            info: libc::tls_crypto_info {
                version: libc::TLS_1_3_VERSION,
                cipher_type: libc::TLS_CIPHER_AES_GCM_128,
            },
            iv: iv.try_into().expect("8 of 12 bytes"),
            key: key.key,
            salt: salt.try_into().expect("4 of 12 bytes"),
            // The order of the record itself.
            rec_seq: sequence_bytes(key.sequence),
        };
        // SAFETY: the kernel reads the structure during the call.
        let result = unsafe {
            libc::setsockopt(
                self.raw(),
                libc::SOL_TLS,
                direction.option(),
                (&raw const info).cast(),
                length_of(size_of::<CryptoInfo>()),
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Records that the kernel has encrypted with the key of this side.
    pub(super) fn tls_records_sent(&self) -> io::Result<u64> {
        let mut info = MaybeUninit::<CryptoInfo>::zeroed();
        let mut length = length_of(size_of::<CryptoInfo>());
        // SAFETY: the kernel writes at most `length` bytes, those of the structure.
        let result = unsafe {
            libc::getsockopt(
                self.raw(),
                libc::SOL_TLS,
                libc::TLS_TX,
                info.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: zeroes are a valid value, and so is whatever the kernel wrote.
        let info = unsafe { info.assume_init() };
        let mut sequence = info.rec_seq;
        sequence.reverse();
        Ok(u64::from_le_bytes(sequence))
    }

    /// Receives a record that is no application data: its type and its length.
    pub(super) fn receive_record(&self, into: &mut [u8]) -> io::Result<(u8, usize)> {
        let mut control: Control = [0; 8];
        let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        let mut message = message_of(&mut part, &mut control);
        // SAFETY: the message points to the caller's buffer and to the control buffer, both of
        // which live during the call.
        let received = unsafe { libc::recvmsg(self.raw(), &raw mut message, 0) };
        let bytes = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        // SAFETY: the kernel has filled the control buffer as the header says.
        let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        if header.is_null() {
            return Err(io::Error::other("the kernel did not tell the type of a record"));
        }
        // SAFETY: a header that is not null lies in the control buffer, which is aligned for it.
        let header_read = unsafe { ptr::read(header) };
        let what = (header_read.cmsg_level, header_read.cmsg_type);
        if what != (libc::SOL_TLS, libc::TLS_GET_RECORD_TYPE) {
            return Err(io::Error::other("the kernel told something else of a record"));
        }
        // SAFETY: the header is one of the control buffer.
        let data = unsafe { libc::CMSG_DATA(header) };
        // SAFETY: the data of such a message is one byte.
        let content = unsafe { ptr::read(data) };
        Ok((content, bytes))
    }

    /// Sends an alert without waiting, if the peer takes it.
    pub(super) fn send_alert(&self, alert: &[u8; 2]) {
        let mut control: Control = [0; 8];
        let mut part =
            libc::iovec { iov_base: alert.as_ptr().cast_mut().cast(), iov_len: alert.len() };
        let mut message = message_of(&mut part, &mut control);
        // SAFETY: a constant computation.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(1) } as _;
        // SAFETY: the control buffer is longer than one header.
        let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        // SAFETY: a constant computation.
        let cmsg_len = unsafe { libc::CMSG_LEN(1) } as _;
        let (cmsg_level, cmsg_type) = (libc::SOL_TLS, libc::TLS_SET_RECORD_TYPE);
        // SAFETY: the header lies in the control buffer, which is aligned for it.
        unsafe { ptr::write(header, libc::cmsghdr { cmsg_len, cmsg_level, cmsg_type }) };
        // SAFETY: as above.
        let data = unsafe { libc::CMSG_DATA(header) };
        // SAFETY: the byte after the header is in the buffer.
        unsafe { ptr::write(data, ALERT) };
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // A peer that does not get it takes the end for a cut connection.
        // SAFETY: the kernel reads both buffers during the call.
        unsafe { libc::sendmsg(self.raw(), &raw const message, flags) };
    }

    fn raw(&self) -> c_int {
        self.descriptor().as_raw_fd()
    }
}

fn message_of(part: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: a message header of zeroes is one without address, spans and control data.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = ptr::from_mut(control).cast::<c_void>();
    message.msg_controllen = size_of::<Control>() as _;
    message
}

fn length_of(bytes: usize) -> socklen_t {
    socklen_t::try_from(bytes).expect("a few bytes")
}

/// The eight bytes of a number, the highest first.
fn sequence_bytes(number: u64) -> [u8; 8] {
    let mut bytes = number.to_le_bytes();
    bytes.reverse();
    bytes
}
