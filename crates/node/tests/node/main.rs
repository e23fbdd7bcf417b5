//! A node: its configuration, its HTTP port, its doctor and its systemd unit.

mod configuration;
mod doctor;
mod http;
mod systemd;
