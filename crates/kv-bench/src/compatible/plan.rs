//! The requests of the original's simulated users, in the order in which they arrive.
//!
//! The original draws from one generator of Python. This plan draws the same numbers in the same
//! order: first all users, then for each arrival its turn and the user's next pause, then whether
//! it has a known prompt. So a seed gives the users that it gives there, and for one user also the
//! same requests. With several users, the order there depends on threads.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::time::Duration;

use crate::compatible::documents::{ObjectDocuments, ObjectRetrieval};
use crate::compatible::entry::EntryName;
use crate::compatible::mersenne_twister::MersenneTwister;
use crate::compatible::recorded_plan::RecordedPlan;
use crate::measurements::RequestFacts;
use crate::plan::{Phases, Workload};
use crate::qos::QosClass;
use crate::workload_settings::WorkloadSettings;

/// New tokens from which a request only writes.
const WRITES_ONLY_TOKENS: u32 = 10_000;
/// Tokens of the system prompts that are counted, and not stored.
pub const COUNTED_PROMPT_TOKENS: [u64; 3] = [5, 9, 6];
/// Contexts for each user that are stored before the window, with decode alone.
pub const STORED_PER_USER: u32 = 10;
/// Tokens of such a context, and of an entry that is written by preconditioning.
pub const STORED_TOKENS: u64 = 2048;

/// A request of the original.
#[derive(Debug, Clone, PartialEq)]
pub struct ObjectRequest {
    /// The user.
    pub user: u32,
    /// Its number among all requests, in the order of arrival.
    pub number: u64,
    /// The user's class.
    pub class: QosClass,
    /// The conversation, counted by user.
    pub conversation: u32,
    /// The turn in it, from 1.
    pub turn: u32,
    /// When it arrives, from the start of the window.
    pub arrival: Duration,
    /// The system prompt that it is counted to begin with.
    pub prompt: Option<u8>,
    /// Tokens whose KV it stores. Those of the system prompt are taken off.
    pub context_tokens: u64,
    /// Tokens to generate.
    pub generated_tokens: u64,
    /// Whether it is so long that it only writes.
    pub only_writes: bool,
    /// With decode alone: the stored context that it reads.
    pub stored_context: Option<u32>,
    /// The document that it is a question about.
    pub question: Option<DocumentQuestion>,
    /// Chunks that it reads before it generates.
    pub retrieval: Option<ObjectRetrieval>,
}

/// A request that is a question about a document. It stores its context if no earlier one has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DocumentQuestion {
    /// The document.
    pub document: u32,
    /// Whether it is the first one to arrive.
    pub is_first: bool,
}

impl ObjectRequest {
    /// Reads of its entry after the first one, usually one for each 32 generated tokens.
    pub fn decode_reads(&self, settings: &WorkloadSettings) -> u64 {
        self.generated_tokens.div_ceil(settings.tokens_per_decode_read).max(1)
    }

    /// The entry of a turn of its conversation.
    pub fn entry_of(&self, turn: u32) -> EntryName {
        EntryName::Turn { user: self.user, conversation: self.conversation, turn }
    }

    /// Its own entry.
    pub fn own_entry(&self) -> EntryName {
        match self.question {
            Some(question) => EntryName::Question(question.document),
            None => self.entry_of(self.turn),
        }
    }

    /// What the figures need of it.
    pub fn facts(&self) -> RequestFacts {
        RequestFacts {
            user: self.user,
            number: self.number,
            class: self.class,
            generated_tokens: self.generated_tokens,
        }
    }
}

#[derive(Debug, Clone)]
struct User {
    class: QosClass,
    context_tokens: u32,
    generated_tokens: u32,
    think_seconds: f64,
    conversation: u32,
    /// The last turn of the conversation; 0 before the first.
    turn: u32,
}

/// All requests of all users, in the order of arrival. It never ends.
#[derive(Debug, Clone)]
pub struct Schedule {
    random: MersenneTwister,
    users: Vec<User>,
    arrivals: BinaryHeap<Reverse<(Duration, u32)>>,
    requests: u64,
    has_multi_turn: bool,
    counts_prompts: bool,
    phases: Phases,
    settings: WorkloadSettings,
    /// What is recorded, in the place of users.
    recorded: Option<RecordedPlan>,
    documents: Option<ObjectDocuments>,
    /// The question that follows the last request.
    next_question: Option<Drawn>,
    /// Documents that were asked about.
    asked: HashSet<u32>,
}

/// A request before its system prompt is drawn.
#[derive(Debug, Clone)]
struct Drawn {
    user: u32,
    class: QosClass,
    conversation: u32,
    turn: u32,
    arrival: Duration,
    context_tokens: u32,
    generated_tokens: u32,
    document: Option<u32>,
}

impl Schedule {
    /// The users before their first requests.
    pub fn new(workload: &Workload) -> Self {
        let mut random = MersenneTwister::new(workload.seed);
        let settings = workload.settings;
        let recorded = workload.recorded.as_ref().map(RecordedPlan::new);
        let users = if recorded.is_some() { 0..0 } else { 0..workload.users };
        let users: Vec<User> = users.map(|_| User::new(&settings, &mut random)).collect();
        // The original draws them in a thread, while the first users wait.
        let documents = ObjectDocuments::draw(workload, &mut random);
        let mut arrivals = BinaryHeap::new();
        for (number, user) in (0..).zip(&users) {
            arrivals.push(Reverse((user.pause(&mut random), number)));
        }
        Self {
            random,
            users,
            arrivals,
            requests: 0,
            has_multi_turn: workload.has_multi_turn,
            counts_prompts: workload.has_shared_prompts,
            phases: workload.phases,
            settings,
            recorded,
            documents,
            next_question: None,
            asked: HashSet::new(),
        }
    }

    /// The documents that are stored at the start of the window.
    pub fn documents(&self) -> Option<&ObjectDocuments> {
        self.documents.as_ref()
    }

    /// Most tokens of a request of generated users.
    pub fn context_tokens_max(&self) -> u64 {
        u64::from(self.users.iter().map(|user| user.context_tokens).max().unwrap_or(0))
    }

    /// Whether a user has this class.
    pub(crate) fn has_class(&self, class: QosClass) -> bool {
        self.recorded.is_some() || self.users.iter().any(|user| user.class == class)
    }

    /// The class of a user, its context, generated tokens and seconds of thinking.
    pub fn user(&self, user: usize) -> Option<(QosClass, u32, u32, f64)> {
        let it = self.users.get(user)?;
        Some((it.class, it.context_tokens, it.generated_tokens, it.think_seconds))
    }

    /// The next turn of the user that asks next, or the next recorded request.
    fn draw(&mut self) -> Option<Drawn> {
        if let Some(recorded) = &mut self.recorded {
            let request = recorded.next(&mut self.random)?;
            return Some(Drawn {
                user: request.user,
                class: self.settings.class(self.random.unit()),
                // Each is a conversation of its own: none reads earlier turns.
                conversation: request.entry,
                turn: 1,
                arrival: request.arrival,
                context_tokens: request.lengths.context_tokens,
                generated_tokens: request.lengths.generated_tokens,
                document: None,
            });
        }
        if let Some(question) = self.next_question.take() {
            return Some(question);
        }
        let Reverse((arrival, number)) = self.arrivals.pop()?;
        let user = &mut self.users[number as usize];
        user.begin_turn(self.has_multi_turn, &self.settings, &mut self.random);
        let quarter = |most: u32| ((most / 4).max(1), most);
        let context_tokens = self.random.between(quarter(user.context_tokens));
        let generated_tokens = self.random.between(quarter(user.generated_tokens));
        let drawn = Drawn {
            user: number,
            class: user.class,
            conversation: user.conversation,
            turn: user.turn,
            arrival,
            context_tokens,
            generated_tokens,
            document: None,
        };
        let question = self.documents.as_mut().and_then(|it| it.question(&mut self.random));
        self.next_question = question.map(|question| Drawn {
            turn: 1,
            context_tokens: question.context_tokens,
            generated_tokens: question.generated_tokens,
            document: Some(question.document),
            ..drawn.clone()
        });
        let next = arrival + user.pause(&mut self.random);
        self.arrivals.push(Reverse((next, number)));
        Some(drawn)
    }

    fn draw_prompt(&mut self) -> Option<u8> {
        if !self.counts_prompts || self.random.unit() >= self.settings.prompt_share {
            return None;
        }
        Some(match self.random.below(3) {
            0 => 0,
            1 => 1,
            _ => 2,
        })
    }
}

impl Iterator for Schedule {
    type Item = ObjectRequest;

    fn next(&mut self) -> Option<ObjectRequest> {
        let drawn = self.draw()?;
        let Drawn { user, class, conversation, turn, arrival, .. } = drawn;
        let (context, generated) = (drawn.context_tokens, drawn.generated_tokens);
        let prompt = self.draw_prompt();
        let known = prompt.map_or(0, |prompt| COUNTED_PROMPT_TOKENS[usize::from(prompt)]);
        let retrieval = self.documents.as_mut().and_then(|it| it.retrieval(&mut self.random));
        let question = drawn
            .document
            .map(|document| DocumentQuestion { document, is_first: self.asked.insert(document) });
        // A question never only writes.
        let only_writes = context >= WRITES_ONLY_TOKENS && question.is_none();
        let reads_stored = self.phases == Phases::DecodeOnly && !only_writes;
        let stored = u32::try_from(self.users.len()).unwrap_or(u32::MAX) * STORED_PER_USER;
        let request = ObjectRequest {
            user,
            number: self.requests,
            class,
            conversation,
            turn,
            arrival,
            prompt,
            context_tokens: u64::from(context).saturating_sub(known),
            generated_tokens: u64::from(generated),
            only_writes,
            stored_context: reads_stored.then(|| self.random.below(stored)),
            question,
            retrieval,
        };
        self.requests += 1;
        Some(request)
    }
}

impl User {
    fn new(settings: &WorkloadSettings, random: &mut MersenneTwister) -> Self {
        let kind = settings.kinds[random.below(3) as usize];
        let (least, most) = kind.think_ms;
        let seconds = |ms: u32| f64::from(ms) / 1000.0;
        let class = settings.class(random.unit());
        Self {
            class,
            context_tokens: random.between(kind.context),
            generated_tokens: random.between(kind.generated),
            think_seconds: random.uniform((seconds(least), seconds(most))),
            conversation: 0,
            turn: 0,
        }
    }

    /// The time until the user's next request. It does not wait for an answer.
    fn pause(&self, random: &mut MersenneTwister) -> Duration {
        let seconds = self.think_seconds * random.uniform((0.8, 1.2));
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }

    /// Goes on with the conversation, or begins one.
    fn begin_turn(
        &mut self,
        has_multi_turn: bool,
        settings: &WorkloadSettings,
        random: &mut MersenneTwister,
    ) {
        let goes_on = has_multi_turn
            && self.turn > 0
            && random.unit() < settings.continues
            && self.turn < settings.turns_max;
        if goes_on {
            self.turn += 1;
        } else {
            self.conversation += 1;
            self.turn = 1;
        }
    }
}

/// Bytes that the run stores: of all requests if their number is limited, else of one of each user.
pub fn stored_bytes(workload: &Workload) -> u64 {
    let schedule = Schedule::new(workload);
    let documents = schedule
        .documents()
        .map_or(0, |all| (0..all.count()).flat_map(|it| all.chunks(it)).map(u64::from).sum());
    let tokens: u64 = if workload.phases == Phases::DecodeOnly {
        u64::from(workload.users) * u64::from(STORED_PER_USER) * STORED_TOKENS
    } else {
        let requests = workload.requests_max.unwrap_or(u64::from(workload.users));
        let requests = usize::try_from(requests).unwrap_or(usize::MAX);
        schedule.take(requests).map(|request| request.context_tokens).sum()
    };
    (tokens + documents) * workload.model.bytes_per_token
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::KvModel;
    use crate::retrieval::Documents;

    fn workload(users: u32) -> Workload {
        Workload {
            model: KvModel::new("tiny-1b", 1).unwrap(),
            users,
            seed: 42,
            has_multi_turn: true,
            has_shared_prompts: true,
            requests_max: None,
            documents: Documents::default(),
            phases: Phases::Both,
            recorded: None,
            settings: crate::workload_settings::WorkloadSettings::default(),
        }
    }

    /// What the original makes of `--seed 42`.
    #[test]
    fn a_seed_gives_the_users_of_the_original() {
        let schedule = Schedule::new(&workload(6));
        for (at, (class, context, generated, think)) in [
            (QosClass::Interactive, 16_245, 481, 0.593_870_224_564_171_4),
            (QosClass::Batch, 3283, 189, 0.134_775_533_051_766_48),
            (QosClass::Interactive, 7166, 211, 0.386_128_714_712_591_7),
            (QosClass::Interactive, 7353, 758, 0.803_423_785_153_990_5),
            (QosClass::Batch, 4308, 488, 0.844_655_401_466_246_4),
            (QosClass::Responsive, 8648, 359, 0.558_376_514_529_106_5),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(schedule.user(at), Some((class, context, generated, think)));
        }
    }

    #[test]
    fn requests_arrive_in_order_and_have_the_published_shares() {
        let all: Vec<_> = Schedule::new(&workload(50)).take(10_000).collect();
        assert!(all.is_sorted_by(|one, next| one.arrival <= next.arrival));
        assert!((0..).zip(&all).all(|(number, request)| request.number == number));
        let share = |is: &dyn Fn(&&ObjectRequest) -> bool| {
            all.iter().filter(|it| is(it)).count() as f64 / all.len() as f64
        };
        let prompts = share(&|it| it.prompt.is_some());
        assert!((prompts - 0.2).abs() < 0.02, "{prompts}");
        let first = share(&|it| it.turn == 1);
        assert!((first - 0.2).abs() < 0.03, "{first}");
        assert!(all.iter().all(|it| it.turn <= 50 && it.context_tokens >= 119));
        for request in &all {
            let longest = request.context_tokens + if request.prompt.is_some() { 9 } else { 0 };
            assert!(request.context_tokens < 10_000 || request.only_writes, "{request:?}");
            assert!(longest >= 10_000 || !request.only_writes, "{request:?}");
        }
        assert!(all.iter().any(|it| it.only_writes) && !all.iter().all(|it| it.only_writes));
    }

    #[test]
    fn without_conversations_each_request_is_one_of_its_own() {
        let alone = Workload { has_multi_turn: false, has_shared_prompts: false, ..workload(3) };
        let all: Vec<_> = Schedule::new(&alone).take(60).collect();
        assert!(all.iter().all(|it| it.turn == 1 && it.prompt.is_none()));
        let mut entries: Vec<_> = all.iter().map(|it| (it.user, it.conversation)).collect();
        entries.sort_unstable();
        entries.dedup();
        assert_eq!(entries.len(), 60);
    }
}
