//! Serves the runbooks: the pages that the `runbook_url` of an alert links to.

use axum::extract::Path;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

/// The alerts in `packaging/prometheus/alerts.yml` and their runbooks.
const RUNBOOKS: &[(&str, &str)] = &[
    ("CascadeNotReady", include_str!("runbooks/CascadeNotReady.md")),
    ("CascadeTierOpen", include_str!("runbooks/CascadeTierOpen.md")),
    ("CascadeTierStuck", include_str!("runbooks/CascadeTierStuck.md")),
    ("CascadeDamagedBlocks", include_str!("runbooks/CascadeDamagedBlocks.md")),
    ("CascadeHitRateCollapsed", include_str!("runbooks/CascadeHitRateCollapsed.md")),
    ("CascadeClientsStuck", include_str!("runbooks/CascadeClientsStuck.md")),
    ("CascadePutsFail", include_str!("runbooks/CascadePutsFail.md")),
];

/// The runbook of an alert, as text.
pub(super) async fn runbook(Path(alert): Path<String>) -> Response {
    let found = RUNBOOKS.iter().find(|(name, _)| *name == alert);
    let Some((_, page)) = found else { return StatusCode::NOT_FOUND.into_response() };
    ([(CONTENT_TYPE, "text/plain; charset=utf-8")], *page).into_response()
}
