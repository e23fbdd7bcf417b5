//! The calls of a store: put, prepare, lookup, read, flush, erase, find, changes.

mod arrivals;
mod chains;
pub(crate) mod changes;
pub(crate) mod clear;
pub(crate) mod erase;
mod fetch_source;
pub(crate) mod find;
pub(crate) mod flush;
pub mod holds;
pub(crate) mod list;
pub(crate) mod lookup;
pub(crate) mod prefetch;
pub(crate) mod prepare;
pub(crate) mod put;
pub(crate) mod put_check;
mod put_end;
mod put_facts;
mod put_room;
mod put_slabs;
pub(crate) mod read;
pub(crate) mod read_counters;
mod read_each;
mod read_flow;
pub(crate) mod resident_views;
mod scrub;
pub(crate) mod sources;
pub(crate) mod write_through;
