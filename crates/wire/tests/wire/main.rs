//! The messages between a node and its clients.

mod messages;
