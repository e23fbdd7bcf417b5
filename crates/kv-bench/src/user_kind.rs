//! The kinds of users that the original simulates.

/// A kind of user: ranges from which each user's habits are drawn, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UserKind {
    /// Most tokens of a context.
    pub(crate) context: (u32, u32),
    /// Most generated tokens.
    pub(crate) generated: (u32, u32),
    /// Time between an answer and the next request, in milliseconds.
    pub(crate) think_ms: (u32, u32),
}

/// Chatbot, coding assistant, document analysis.
pub(crate) const KINDS: [UserKind; 3] = [
    UserKind { context: (512, 4096), generated: (50, 200), think_ms: (100, 500) },
    UserKind { context: (4096, 25_000), generated: (100, 500), think_ms: (200, 1000) },
    UserKind { context: (4096, 16_384), generated: (200, 800), think_ms: (300, 1500) },
];
