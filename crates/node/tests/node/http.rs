//! Tests of the HTTP port: metrics, status page, traces, access and limits.

#![expect(clippy::unwrap_used, reason = "in a test, a surprise should panic")]
#![expect(clippy::disallowed_methods, reason = "other programs run on the machine's clock")]
#![expect(clippy::print_stdout, reason = "a test that cannot run says why")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small figures, and bytes that wrap"
)]

mod hit_rate;
mod limits;
mod metrics;
mod page;
mod prometheus;
mod provoked;
mod security;
mod served;
mod traces;
mod users;
