//! What a configuration file may change of the workload. The defaults are those of the original.

use crate::qos::{QosClass, QosTargets};
use crate::user_kind::{KINDS, UserKind};

/// Settings of users, classes and conversations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WorkloadSettings {
    /// Chatbot, coding assistant, document analysis.
    pub(crate) kinds: [UserKind; 3],
    /// Share of users of the interactive class.
    pub(crate) interactive_share: f64,
    /// Share of users of the interactive and the responsive class together.
    pub(crate) attended_share: f64,
    /// Latencies that the classes expect.
    pub(crate) targets: [QosTargets; 3],
    /// Share of conversations, or of requests in compatible mode, with a system prompt.
    pub(crate) prompt_share: f64,
    /// Most turns of a conversation.
    pub turns_max: u32,
    /// Share of turns after which a conversation goes on.
    pub(crate) continues: f64,
    /// Generated tokens for each read of the context.
    pub tokens_per_decode_read: u64,
}

impl Default for WorkloadSettings {
    fn default() -> Self {
        Self {
            kinds: KINDS,
            interactive_share: 0.15,
            attended_share: 0.5,
            targets: QosClass::ALL.map(QosClass::targets),
            prompt_share: 0.2,
            turns_max: 50,
            continues: 0.8,
            tokens_per_decode_read: 32,
        }
    }
}

impl WorkloadSettings {
    /// The class of a user by a uniform number from zero to one.
    pub(crate) fn class(&self, share: f64) -> QosClass {
        match share {
            share if share < self.interactive_share => QosClass::Interactive,
            share if share < self.attended_share => QosClass::Responsive,
            _ => QosClass::Batch,
        }
    }
}
