//! Log lines about tiers: what is damaged, what fell back, which direction is not used.

use std::collections::{BTreeMap, BTreeSet};

use crate::status::{HealthState, Status};

/// Most notes that are remembered as told; beyond it they are told anew.
const TOLD_MAX: usize = 1024;

/// What was told of the tiers already.
#[derive(Debug, Default)]
pub(crate) struct TierLog {
    notes: BTreeSet<String>,
    /// By tenant and tier: whether it is read, and whether it is written.
    used: BTreeMap<(String, String), (bool, bool)>,
}

impl TierLog {
    /// What is new since the last look, a line each.
    pub(crate) fn news(&mut self, status: &Status) -> Vec<String> {
        let mut lines = Vec::new();
        for tenant in &status.tenants {
            for tier in &tenant.tiers {
                let whose = format!("tier {} of tenant {}", tier.name, tenant.name);
                let name = (tenant.name.clone(), tier.name.clone());
                if let Some(health) = &tier.health {
                    let is_used = |state| state == HealthState::Healthy;
                    let used = (is_used(health.reads), is_used(health.writes));
                    let before = self.used.insert(name, used).unwrap_or((true, true));
                    let error = health.last_error.as_deref().unwrap_or("no error was told");
                    for (direction, before, now) in
                        [("read", before.0, used.0), ("written", before.1, used.1)]
                    {
                        match (before, now) {
                            (true, false) => {
                                lines.push(format!("{whose} is not {direction}: {error}"));
                            }
                            (false, true) => lines.push(format!("{whose} is {direction} again")),
                            _ => {}
                        }
                    }
                }
                for note in &tier.notes {
                    if self.is_new(&whose, note) {
                        lines.push(format!("{whose}: {note}"));
                    }
                }
            }
        }
        lines
    }

    /// A note that differs from another in its figures alone is told once; one about a file is
    /// told of each file.
    fn is_new(&mut self, whose: &str, note: &str) -> bool {
        if self.notes.len() >= TOLD_MAX {
            self.notes.clear();
        }
        let is_figure = |letter: &char| !note.contains('/') && letter.is_ascii_digit();
        let told: String = note.chars().filter(|letter| !is_figure(letter)).collect();
        self.notes.insert(format!("{whose}: {told}"))
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
    fn each_change_is_told_once() {
        let mut log = TierLog::default();
        let healthy = HealthState::Healthy;
        assert!(log.news(&status(healthy, &[])).is_empty());
        let open = log.news(&status(HealthState::Open, &[]));
        assert_eq!(open, ["tier files of tenant alice is not written: EIO"]);
        assert!(log.news(&status(HealthState::Probing, &[])).is_empty());
        let back = log.news(&status(healthy, &["3 reads failed", "/d/a: damaged"]));
        let notes = ["3 reads failed", "/d/a: damaged"]
            .map(|it| format!("tier files of tenant alice: {it}"));
        assert_eq!(back[0], "tier files of tenant alice is written again");
        assert_eq!(back[1..], notes);
        assert!(log.news(&status(healthy, &["4 reads failed", "/d/a: damaged"])).is_empty());
        assert_eq!(log.news(&status(healthy, &["/d/b: damaged"])).len(), 1);
    }
}
