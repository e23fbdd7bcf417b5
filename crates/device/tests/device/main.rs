//! Copies to and from devices, over the fake driver.

mod copies;
mod counts;
mod device_pool;
mod dmabuf;
mod driver;
mod fake;
mod false_nodes;
mod faults;
mod forced_ways;
mod kernel;
mod node_on_gpu;
mod sharing;
mod store;
mod transfers;
mod ways;
