//! Log lines about tiers: damage, fallbacks, circuits that open or close.

use std::collections::{BTreeMap, BTreeSet};

use crate::status::{HealthState, Status};

/// Maximum number of remembered notes. At the limit all are forgotten, and notes are logged again.
const LOGGED_NOTES_MAX: usize = 1024;

/// What was already logged about the tiers.
#[derive(Debug, Default)]
pub(crate) struct TierLog {
    notes: BTreeSet<String>,
    /// By tenant and tier: whether the circuits for reads and for writes were closed.
    circuits: BTreeMap<(String, String), (bool, bool)>,
}

impl TierLog {
    /// One line for each change since the previous call.
    pub(crate) fn new_lines(&mut self, status: &Status) -> Vec<String> {
        let mut lines = Vec::new();
        for tenant in &status.tenants {
            for tier in &tenant.tiers {
                let subject = format!("tier {} of tenant {}", tier.name, tenant.name);
                let name = (tenant.name.clone(), tier.name.clone());
                if let Some(health) = &tier.health {
                    // A circuit that probes counts as open until it closes.
                    let is_closed = |state| state == HealthState::Healthy;
                    let closed = (is_closed(health.reads), is_closed(health.writes));
                    let before = self.circuits.insert(name, closed).unwrap_or((true, true));
                    let error = health.last_error.as_deref().unwrap_or("the error is unknown");
                    for (operations, before, now) in
                        [("reads", before.0, closed.0), ("writes", before.1, closed.1)]
                    {
                        match (before, now) {
                            (true, false) => lines.push(format!(
                                "{subject}: the circuit for {operations} is open: {error}"
                            )),
                            (false, true) => lines.push(format!(
                                "{subject}: the circuit for {operations} is closed again"
                            )),
                            _ => {}
                        }
                    }
                }
                for note in &tier.notes {
                    if self.is_new(&subject, note) {
                        lines.push(format!("{subject}: {note}"));
                    }
                }
            }
        }
        lines
    }

    /// Whether a note was not logged yet. Notes that differ only in their digits count as one:
    /// most are counts that grow. In a note with a path the digits count, so each file is logged.
    fn is_new(&mut self, subject: &str, note: &str) -> bool {
        if self.notes.len() >= LOGGED_NOTES_MAX {
            self.notes.clear();
        }
        let is_dropped = |letter: &char| !note.contains('/') && letter.is_ascii_digit();
        let text: String = note.chars().filter(|letter| !is_dropped(letter)).collect();
        self.notes.insert(format!("{subject}: {text}"))
    }
}

#[cfg(test)]
mod tests {
    use super::TierLog;
    use crate::status::{HealthState, HealthStatus, Status, TenantStatus, TierStatus};

    fn status(writes: HealthState, notes: &[&str]) -> Status {
        let health =
            HealthStatus { writes, last_error: Some("EIO".to_owned()), ..Default::default() };
        let tier = TierStatus {
            name: "files".to_owned(),
            health: Some(health),
            notes: notes.iter().map(|note| (*note).to_owned()).collect(),
            ..Default::default()
        };
        let tenant =
            TenantStatus { name: "alice".to_owned(), tiers: vec![tier], ..Default::default() };
        Status { tenants: vec![tenant], ..Default::default() }
    }

    #[test]
    fn each_change_is_logged_once() {
        let mut log = TierLog::default();
        let healthy = HealthState::Healthy;
        assert!(log.new_lines(&status(healthy, &[])).is_empty());
        let open = log.new_lines(&status(HealthState::Open, &[]));
        assert_eq!(open, ["tier files of tenant alice: the circuit for writes is open: EIO"]);
        assert!(log.new_lines(&status(HealthState::Probing, &[])).is_empty());
        let back = log.new_lines(&status(healthy, &["3 reads failed", "/d/a: damaged"]));
        let notes = ["3 reads failed", "/d/a: damaged"]
            .map(|it| format!("tier files of tenant alice: {it}"));
        assert_eq!(back[0], "tier files of tenant alice: the circuit for writes is closed again");
        assert_eq!(back[1..], notes);
        assert!(log.new_lines(&status(healthy, &["4 reads failed", "/d/a: damaged"])).is_empty());
        assert_eq!(log.new_lines(&status(healthy, &["/d/b: damaged"])).len(), 1);
    }
}
