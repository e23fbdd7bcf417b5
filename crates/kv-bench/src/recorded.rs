//! Requests of a trace or a data set in the place of generated ones: their lengths, their order
//! and, for a trace, when they arrive. Nothing is shared but the turns of a conversation.

use std::path::Path;
use std::time::Duration;

use cascade_replay::random::{SplitMix64, mix};
use cascade_replay::trace::{Import, ReadOptions, Trace, TraceFormat};
use serde_json::{Value, json};

use crate::KvBenchError;

/// Most tokens of a conversation; the next turn beyond them starts a new one. It bounds what one
/// request reads, because here a conversation grows, while each turn of the original is on its own.
pub const CONTEXT_TOKENS_MAX: u64 = 32_768;
/// Most users among whom the requests of a trace are divided, as in the original.
pub const TRACE_USERS_MAX: u32 = 1000;
/// Most tokens of a turn of a data set.
pub const TURN_CONTEXT_TOKENS_MAX: u32 = 8192;
/// The same in compatible mode: that of today's original.
pub const ORIGINAL_CONTEXT_TOKENS_MAX: u32 = 16_384;
/// Most generated tokens of a turn of a data set.
pub const TURN_GENERATED_TOKENS_MAX: u32 = 2048;

/// Lengths of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// New tokens of the prompt.
    pub context_tokens: u32,
    /// Tokens to generate.
    pub generated_tokens: u32,
}

/// Recorded requests.
#[derive(Debug)]
pub struct Recorded {
    option: &'static str,
    file: String,
    import: Import,
    /// How often they are replayed. `None`: until the window ends.
    cycles: Option<u64>,
    requests: Requests,
}

#[derive(Debug)]
enum Requests {
    /// Request `i` of a run is arrival `i % arrivals`.
    Arrivals { all: Vec<(Duration, Lengths)>, speedup: f64 },
    /// A user takes one conversation after the other, turn by turn.
    Conversations { all: Vec<Vec<Lengths>> },
}

/// Where a user is in a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Position {
    /// Conversations of this user before this one, over all cycles.
    conversations: u64,
    /// Turns before this one.
    turns: usize,
}

/// A user's next request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextLengths {
    /// Its lengths.
    pub lengths: Lengths,
    /// Whether it continues the conversation of the request before it.
    pub goes_on: bool,
    /// Whether all cycles ended before it.
    pub is_beyond_end: bool,
    /// Where the user is after it.
    pub after: Position,
}

impl Recorded {
    /// The arrivals of a BurstGPT trace: a file, or a directory of them.
    ///
    /// # Errors
    /// The trace cannot be read, or is damaged.
    pub fn burst_trace(
        path: &Path,
        speedup: f64,
        cycles: Option<u64>,
        is_compatible: bool,
    ) -> Result<Self, KvBenchError> {
        let option = "--burst-trace-path";
        let format = Some(TraceFormat::BurstGpt);
        // The original replays failed requests, too.
        let keeps_failed = is_compatible;
        let trace = read(option, path, ReadOptions { format, keeps_failed, ..Default::default() })?;
        let all = trace.requests.iter().map(|request| {
            let lengths = Lengths {
                context_tokens: request.input_tokens,
                generated_tokens: request.output_tokens,
            };
            (request.at, lengths)
        });
        let requests = Requests::Arrivals { all: all.collect(), speedup };
        Ok(Self::new(option, path, trace.import, cycles, requests))
    }

    /// The conversations of a ShareGPT data set.
    ///
    /// # Errors
    /// The data set cannot be read, or is damaged.
    pub fn data_set(
        path: &Path,
        conversations_max: u64,
        cycles: Option<u64>,
        is_compatible: bool,
    ) -> Result<Self, KvBenchError> {
        let option = "--dataset-path";
        let (format, rows_max) = (Some(TraceFormat::ShareGpt), Some(conversations_max));
        let trace = read(option, path, ReadOptions { format, rows_max, ..Default::default() })?;
        let tokens_max =
            if is_compatible { ORIGINAL_CONTEXT_TOKENS_MAX } else { TURN_CONTEXT_TOKENS_MAX };
        let mut all: Vec<Vec<Lengths>> = Vec::new();
        let (mut last_session, mut earlier_tokens) = (None, 0);
        for request in &trace.requests {
            if request.session != last_session {
                (last_session, earlier_tokens) = (request.session, 0);
                all.push(Vec::new());
            }
            let context_tokens = request.input_tokens.saturating_sub(earlier_tokens);
            earlier_tokens = request.input_tokens.saturating_add(request.output_tokens);
            if let Some(turns) = all.last_mut() {
                turns.push(Lengths {
                    context_tokens: context_tokens.min(tokens_max),
                    generated_tokens: request.output_tokens.min(TURN_GENERATED_TOKENS_MAX),
                });
            }
        }
        Ok(Self::new(option, path, trace.import, cycles, Requests::Conversations { all }))
    }

    fn new(
        option: &'static str,
        path: &Path,
        import: Import,
        cycles: Option<u64>,
        requests: Requests,
    ) -> Self {
        Self { option, file: path.display().to_string(), import, cycles, requests }
    }

    /// How many users there are, of those of `--num-users`: users share the requests of a trace, so
    /// there are no more users than requests.
    pub fn users(&self, asked: u32) -> u32 {
        match &self.requests {
            Requests::Arrivals { all, .. } => {
                u32::try_from(all.len()).unwrap_or(u32::MAX).min(TRACE_USERS_MAX)
            }
            Requests::Conversations { .. } => asked,
        }
    }

    /// Number of requests of all cycles, if it is the same for any number of users.
    pub fn requests_max(&self) -> Option<u64> {
        let cycles = self.cycles?;
        match &self.requests {
            Requests::Arrivals { all, .. } => Some(cycles.saturating_mul(all.len() as u64)),
            Requests::Conversations { .. } => None,
        }
    }

    /// Number of requests of all cycles, if they end.
    pub fn all_requests(&self) -> Option<u64> {
        let count = match &self.requests {
            Requests::Arrivals { all, .. } => all.len(),
            Requests::Conversations { all } => all.iter().map(Vec::len).sum(),
        };
        Some(self.cycles?.saturating_mul(count as u64))
    }

    /// Most new tokens of a request.
    pub fn request_tokens_max(&self) -> u64 {
        let all: &mut dyn Iterator<Item = &Lengths> = match &self.requests {
            Requests::Arrivals { all, .. } => &mut all.iter().map(|(_, lengths)| lengths),
            Requests::Conversations { all } => &mut all.iter().flatten(),
        };
        all.map(|lengths| u64::from(lengths.context_tokens)).max().unwrap_or(0)
    }

    /// Arrival and lengths of a request of a trace. `None` for a data set.
    pub(crate) fn arrival(&self, number: u64) -> Option<(Duration, Lengths)> {
        let Requests::Arrivals { all, .. } = &self.requests else { return None };
        let row = usize::try_from(number % (all.len() as u64).max(1)).ok()?;
        Some((self.due(number), all.get(row)?.1))
    }

    /// The conversations of a data set, each with its turns. None for a trace.
    pub(crate) fn conversations(&self) -> &[Vec<Lengths>] {
        match &self.requests {
            Requests::Arrivals { .. } => &[],
            Requests::Conversations { all } => all,
        }
    }

    /// Whether users end after the cycles of a data set.
    pub(crate) fn ends_users(&self) -> bool {
        self.cycles.is_some() && matches!(self.requests, Requests::Conversations { .. })
    }

    /// Whether it has times at which requests arrive.
    pub(crate) fn has_arrivals(&self) -> bool {
        matches!(self.requests, Requests::Arrivals { .. })
    }

    /// When a request of a trace is due, since the start of the window. A cycle follows the one
    /// before it without a pause.
    pub(crate) fn due(&self, number: u64) -> Duration {
        let Requests::Arrivals { all, speedup } = &self.requests else { return Duration::ZERO };
        let count = all.len() as u64;
        let (cycle, row) = (number / count, number % count);
        let at = |row: u64| usize::try_from(row).ok().and_then(|row| all.get(row));
        let seconds = |row: u64| at(row).map_or(0.0, |(at, _)| at.as_secs_f64()) - first(all);
        if *speedup <= 0.0 {
            return Duration::ZERO;
        }
        let all_seconds = cycle as f64 * seconds(count - 1) + seconds(row);
        Duration::try_from_secs_f64(all_seconds / speedup).unwrap_or(Duration::MAX / 2)
    }

    /// A user's next request. `number` are its requests before.
    pub(crate) fn next(
        &self,
        (user, users): (u32, u32),
        number: u64,
        position: Position,
        seed: u64,
    ) -> NextLengths {
        let (user, users) = (u64::from(user), u64::from(users.max(1)));
        match &self.requests {
            Requests::Arrivals { all, .. } => {
                let row = (number * users + user) % all.len() as u64;
                let lengths = all[usize::try_from(row).unwrap_or(0)].1;
                NextLengths { lengths, goes_on: false, is_beyond_end: false, after: position }
            }
            Requests::Conversations { all } => {
                let count = all.len() as u64;
                let index = position.conversations * users + user;
                let (cycle, place) = (index / count, index % count);
                let turns = &all[shuffled(place, count, seed, cycle)];
                let turn = position.turns;
                let is_last = turn + 1 == turns.len();
                NextLengths {
                    lengths: turns[turn],
                    goes_on: turn > 0,
                    is_beyond_end: self.cycles.is_some_and(|cycles| cycle >= cycles),
                    after: Position {
                        conversations: position.conversations + u64::from(is_last),
                        turns: if is_last { 0 } else { turn + 1 },
                    },
                }
            }
        }
    }

    /// Most tokens of a context.
    pub fn context_tokens_max(&self) -> u64 {
        match &self.requests {
            Requests::Arrivals { all, .. } => {
                all.iter().map(|(_, it)| u64::from(it.context_tokens)).max().unwrap_or(0)
            }
            Requests::Conversations { all } => {
                let tokens = |it: &Lengths| u64::from(it.context_tokens + it.generated_tokens);
                let sums = all.iter().map(|turns| turns.iter().map(tokens).sum::<u64>());
                sums.max().unwrap_or(0).min(CONTEXT_TOKENS_MAX)
            }
        }
    }

    /// What it is, in a line.
    pub fn text(&self) -> String {
        let what = match &self.requests {
            Requests::Arrivals { all, speedup } if *speedup > 0.0 => {
                format!("{} requests, times divided by {speedup}", all.len())
            }
            Requests::Arrivals { all, .. } => format!("{} requests, all due at once", all.len()),
            Requests::Conversations { all } => format!(
                "{} conversations with {} turns; four characters count as one token",
                all.len(),
                all.iter().map(Vec::len).sum::<usize>()
            ),
        };
        let cycles = match self.cycles {
            Some(cycles) => format!("{cycles} times"),
            None => "until the window ends".to_owned(),
        };
        let skipped = self.import.skipped();
        let separator = if skipped.is_empty() { "" } else { "; " };
        format!("{} {}: {what}, replayed {cycles}{separator}{skipped}", self.option, self.file)
    }

    /// The same for the result file.
    pub(crate) fn facts(&self) -> Value {
        let skipped = self.import.rows_skipped.iter();
        let skipped: serde_json::Map<_, _> =
            skipped.map(|(reason, count)| (reason.text().to_owned(), json!(count))).collect();
        let speedup = match &self.requests {
            Requests::Arrivals { speedup, .. } => Some(*speedup),
            Requests::Conversations { .. } => None,
        };
        json!({
            "option": self.option,
            "file": self.file,
            "format": self.import.format_names(),
            "rows_read": self.import.rows_read,
            "rows_skipped": skipped,
            "rows_out_of_order": self.import.rows_out_of_order,
            "cycles": self.cycles,
            "speedup": speedup,
        })
    }
}

fn read(option: &'static str, path: &Path, options: ReadOptions) -> Result<Trace, KvBenchError> {
    let trace = Trace::read_files(&path.display().to_string(), &[path.to_path_buf()], options);
    trace.map_err(|source| KvBenchError::Trace { option, source: Box::new(source) })
}

fn first(all: &[(Duration, Lengths)]) -> f64 {
    all.first().map_or(0.0, |(at, _)| at.as_secs_f64())
}

/// The conversation at a place of a cycle: another order in each cycle, with each conversation
/// once.
fn shuffled(place: u64, count: u64, seed: u64, cycle: u64) -> usize {
    let mut random = SplitMix64(mix(seed) ^ mix(cycle + 1));
    let shift = random.below(count);
    // A step without a common divisor with the count reaches each place once.
    let mut step = 1 + random.below(count);
    while greatest_common_divisor(step, count) != 1 {
        step += 1;
    }
    let at = (u128::from(place) * u128::from(step) + u128::from(shift)) % u128::from(count);
    usize::try_from(at).unwrap_or(0)
}

fn greatest_common_divisor(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { greatest_common_divisor(other, one % other) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speedup_divides_the_times_and_cycles_follow_without_a_pause() {
        let lengths = Lengths { context_tokens: 1, generated_tokens: 1 };
        let at = |seconds| (Duration::from_secs(seconds), lengths);
        let due = |speedup| {
            let requests = Requests::Arrivals { all: vec![at(0), at(10), at(40)], speedup };
            let recorded = Recorded {
                option: "",
                file: String::new(),
                import: Import::default(),
                cycles: None,
                requests,
            };
            (0..7).map(|number| recorded.due(number).as_secs_f64()).collect::<Vec<_>>()
        };
        assert_eq!(due(1.0), [0.0, 10.0, 40.0, 40.0, 50.0, 80.0, 80.0]);
        assert_eq!(due(10.0), [0.0, 1.0, 4.0, 4.0, 5.0, 8.0, 8.0]);
        assert_eq!(due(0.0), [0.0; 7]);
    }

    #[test]
    fn a_shuffled_cycle_has_each_conversation_once_and_cycles_differ() {
        for count in [1, 2, 7, 12, 500] {
            let order = |seed, cycle| -> Vec<usize> {
                (0..count).map(|place| shuffled(place, count, seed, cycle)).collect()
            };
            let mut sorted = order(42, 0);
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..usize::try_from(count).unwrap()), "{count}");
            assert_eq!(order(42, 3), order(42, 3));
        }
        let order = |cycle| (0..500).map(|it| shuffled(it, 500, 42, cycle)).collect::<Vec<_>>();
        assert_ne!(order(0), order(1));
    }
}
