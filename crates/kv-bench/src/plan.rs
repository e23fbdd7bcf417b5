//! What each user does: a sequence of requests that a seed determines, whatever the threads do.
//!
//! Every random choice of a user comes from a generator of its own, seeded with the seed and the
//! user's number, in the order of the user's requests. So a request depends on no other user and on
//! no time.

use std::sync::Arc;
use std::time::Duration;

use cascade_replay::random::{SplitMix64, mix};

use crate::measurements::RequestFacts;
use crate::model::KvModel;
use crate::qos::QosClass;
use crate::recorded::{CONTEXT_TOKENS_MAX, Position, Recorded};
use crate::retrieval::{Documents, Retrieval};
use crate::workload_settings::WorkloadSettings;

/// Tokens of the shared system prompts, rounded up to whole blocks.
pub const PROMPT_TOKENS: [u64; 3] = [512, 1024, 2048];

/// The workload of a run.
#[derive(Debug, Clone)]
pub struct Workload {
    /// The model whose KV is stored.
    pub model: KvModel,
    /// Simulated users.
    pub users: u32,
    /// The seed of all choices and bytes.
    pub seed: u64,
    /// Whether a turn continues the user's conversation.
    pub has_multi_turn: bool,
    /// Whether conversations share system prompts.
    pub has_shared_prompts: bool,
    /// Number of requests of all users together; no limit if none.
    pub requests_max: Option<u64>,
    /// Documents that some requests read parts of.
    pub documents: Documents,
    /// Which phases of a request are run.
    pub phases: Phases,
    /// Requests of a trace or a data set, in the place of generated ones.
    pub recorded: Option<Arc<Recorded>>,
    /// Settings of users, classes and conversations.
    pub settings: WorkloadSettings,
}

/// Which phases of a request are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phases {
    /// Prefill and decode.
    Both,
    /// Loads earlier turns and writes the new one, as an engine for prefill does.
    PrefillOnly,
    /// Only reads, of contexts that are stored before the window, as an engine for decode does.
    DecodeOnly,
}

impl Phases {
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Both => "prefill and decode",
            Self::PrefillOnly => "prefill only",
            Self::DecodeOnly => "decode only",
        }
    }
}

/// One request of a user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedRequest {
    /// The user.
    pub user: u32,
    /// Its number among the user's requests, from 0.
    pub number: u64,
    /// The user's class.
    pub class: QosClass,
    /// The conversation, counted by user.
    pub conversation: u32,
    /// The turn in it, from 1.
    pub turn: u32,
    /// The shared system prompt that the conversation starts with.
    pub prompt: Option<u8>,
    /// Blocks of that prompt.
    pub prompt_blocks: u64,
    /// Own blocks of the conversation that earlier turns have stored.
    pub earlier_blocks: u64,
    /// Own blocks of the conversation after this prefill.
    pub total_blocks: u64,
    /// New tokens of the prompt.
    pub context_tokens: u64,
    /// Tokens to generate.
    pub generated_tokens: u64,
    /// Generated tokens for each read of the context.
    pub tokens_per_decode_read: u64,
    /// How long the user thinks before it.
    pub think: Duration,
    /// Parts of a document that it reads before.
    pub retrieval: Option<Retrieval>,
}

impl PlannedRequest {
    /// How often the whole context is read while tokens are generated.
    pub fn decode_reads(&self) -> u64 {
        self.generated_tokens.div_ceil(self.tokens_per_decode_read).max(1)
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

    /// Blocks that the prefill stores.
    pub fn new_blocks(&self) -> u64 {
        self.total_blocks - self.earlier_blocks
    }
}

/// A user with its generator and conversation.
#[derive(Debug, Clone)]
pub struct UserPlan {
    random: SplitMix64,
    /// Of its own, so that all else is the same with and without documents.
    retrieval_random: SplitMix64,
    user: u32,
    /// The user's class.
    pub class: QosClass,
    context_tokens: u64,
    generated_tokens: u64,
    think_ms: u64,
    requests: u64,
    conversations: u32,
    conversation: Option<Conversation>,
    /// With decode alone, what is stored before the window.
    stored_context: Option<PlannedRequest>,
    /// Where it is in a data set.
    position: Position,
    /// Whether the data set ended before its last request.
    is_exhausted: bool,
}

/// The next turn of a user, before it is known which blocks it needs.
#[derive(Debug, Clone, Copy)]
struct Turn {
    class: QosClass,
    think: Duration,
    goes_on: bool,
    prompt: Option<u8>,
    context_tokens: u64,
    generated_tokens: u64,
}

#[derive(Debug, Clone)]
struct Conversation {
    turn: u32,
    prompt: Option<u8>,
    /// Own tokens, answers included.
    tokens: u64,
    stored_blocks: u64,
}

impl Workload {
    /// Blocks of a shared system prompt.
    pub fn prompt_blocks(&self, prompt: u8) -> u64 {
        PROMPT_TOKENS[usize::from(prompt)].div_ceil(self.model.block_tokens)
    }

    /// Requests of a user, if the run has a limit: request `i` of a run is one of user
    /// `i % users`.
    pub fn requests_of(&self, user: u32) -> Option<u64> {
        let (all, users) = (self.requests_max?, u64::from(self.users));
        Some(all / users + u64::from(u64::from(user) < all % users))
    }

    /// Bytes that the run stores: of all requests if their number is limited, else of the first
    /// request of each user. The shared prompts are included.
    pub fn stored_bytes(&self) -> u64 {
        let own = (0..self.users).map(|user| {
            let mut plan = UserPlan::new(self, user);
            if self.phases == Phases::DecodeOnly {
                return plan.next_request(self).total_blocks;
            }
            let ends_users = self.recorded.as_ref().is_some_and(|it| it.ends_users());
            let requests = self.requests_of(user).unwrap_or(if ends_users { u64::MAX } else { 1 });
            let blocks = (0..requests).map_while(|_| {
                let request = plan.next_request(self);
                (!plan.is_exhausted()).then(|| request.new_blocks())
            });
            blocks.sum::<u64>()
        });
        let prompts = if self.has_shared_prompts { 0..3 } else { 0..0 };
        let shared = prompts.map(|prompt| self.prompt_blocks(prompt));
        let documents = self.documents.blocks(self.seed, &self.model);
        let blocks = own.sum::<u64>() + shared.sum::<u64>() + documents;
        blocks * self.model.block_bytes as u64
    }
}

impl UserPlan {
    /// A user before its first request.
    pub fn new(workload: &Workload, user: u32) -> Self {
        let mut random = SplitMix64(mix(workload.seed) ^ mix(u64::from(user) + 1));
        let settings = &workload.settings;
        let kind = settings.kinds[usize::from(below_three(&mut random))];
        let class = settings.class(random.unit());
        let mut habit =
            |(least, most): (u32, u32)| between(&mut random, (u64::from(least), u64::from(most)));
        let context_tokens = habit(kind.context);
        let generated_tokens = habit(kind.generated);
        let think_ms = habit(kind.think_ms);
        let retrieval_random = SplitMix64(mix(!workload.seed) ^ mix(u64::from(user) + 1));
        Self {
            random,
            retrieval_random,
            user,
            class,
            context_tokens,
            generated_tokens,
            think_ms,
            requests: 0,
            conversations: 0,
            conversation: None,
            stored_context: None,
            position: Position::default(),
            is_exhausted: false,
        }
    }

    /// Whether the requests that are recorded for it ended before the one that it gave last.
    pub fn is_exhausted(&self) -> bool {
        self.is_exhausted
    }

    /// The user's number.
    pub fn user(&self) -> u32 {
        self.user
    }

    /// The user's next request.
    pub fn next_request(&mut self, workload: &Workload) -> PlannedRequest {
        let turn = self.next_turn(workload);
        if workload.phases != Phases::DecodeOnly {
            return turn;
        }
        // Each request reads the context of the user's first one.
        let context = self.stored_context.get_or_insert_with(|| turn.clone()).clone();
        PlannedRequest {
            number: turn.number,
            generated_tokens: turn.generated_tokens,
            think: turn.think,
            retrieval: turn.retrieval,
            context_tokens: 0,
            earlier_blocks: context.total_blocks,
            ..context
        }
    }

    fn next_turn(&mut self, workload: &Workload) -> PlannedRequest {
        let turn = match &workload.recorded {
            Some(recorded) => self.recorded_turn(workload, recorded),
            None => self.generated_turn(workload),
        };
        self.request_of(workload, turn)
    }

    /// Users of a trace or a data set do not think.
    fn recorded_turn(&mut self, workload: &Workload, recorded: &Recorded) -> Turn {
        let users = (self.user, workload.users);
        let next = recorded.next(users, self.requests, self.position, workload.seed);
        (self.position, self.is_exhausted) = (next.after, next.is_beyond_end);
        Turn {
            class: workload.settings.class(self.random.unit()),
            think: Duration::ZERO,
            goes_on: next.goes_on && workload.has_multi_turn,
            prompt: None,
            context_tokens: u64::from(next.lengths.context_tokens),
            generated_tokens: u64::from(next.lengths.generated_tokens),
        }
    }

    fn generated_turn(&mut self, workload: &Workload) -> Turn {
        let think = Duration::from_millis(self.think_ms).mul_f64(0.8 + 0.4 * self.random.unit());
        let settings = &workload.settings;
        let goes_on = self.random.unit() < settings.continues && workload.has_multi_turn;
        let shares = self.random.unit() < settings.prompt_share && workload.has_shared_prompts;
        let prompt = below_three(&mut self.random);
        let context_tokens = below_or_at(&mut self.random, self.context_tokens);
        let generated_tokens = below_or_at(&mut self.random, self.generated_tokens);
        let prompt = shares.then_some(prompt);
        Turn { class: self.class, think, goes_on, prompt, context_tokens, generated_tokens }
    }

    /// The request of a turn: it continues the user's conversation, or begins another.
    fn request_of(&mut self, workload: &Workload, turn: Turn) -> PlannedRequest {
        let Turn { class, think, goes_on, prompt, context_tokens, generated_tokens } = turn;
        let fits = |it: &Conversation| {
            it.turn < workload.settings.turns_max
                && it.tokens + context_tokens <= CONTEXT_TOKENS_MAX
        };
        let mut conversation = match self.conversation.take().filter(fits) {
            Some(conversation) if goes_on => conversation,
            _ => {
                self.conversations += 1;
                Conversation { turn: 0, prompt, tokens: 0, stored_blocks: 0 }
            }
        };
        conversation.turn += 1;
        let earlier_blocks = conversation.stored_blocks;
        let total_blocks = workload.model.whole_blocks(conversation.tokens + context_tokens);
        let request = PlannedRequest {
            user: self.user,
            number: self.requests,
            class,
            conversation: self.conversations,
            turn: conversation.turn,
            prompt: conversation.prompt,
            prompt_blocks: conversation.prompt.map_or(0, |it| workload.prompt_blocks(it)),
            earlier_blocks,
            total_blocks,
            context_tokens,
            generated_tokens,
            tokens_per_decode_read: workload.settings.tokens_per_decode_read,
            think,
            retrieval: workload.documents.retrieval(
                &mut self.retrieval_random,
                workload.seed,
                &workload.model,
            ),
        };
        // The KV of the answer is stored with the next turn, whose prompt begins with it.
        conversation.tokens += context_tokens + generated_tokens;
        conversation.stored_blocks = total_blocks;
        self.conversation = Some(conversation);
        self.requests += 1;
        request
    }
}

fn below_three(random: &mut SplitMix64) -> u8 {
    match random.below(3) {
        0 => 0,
        1 => 1,
        _ => 2,
    }
}

fn between(random: &mut SplitMix64, (least, most): (u64, u64)) -> u64 {
    least + random.below(most - least + 1)
}

/// A number from a quarter of `most` to `most`.
fn below_or_at(random: &mut SplitMix64, most: u64) -> u64 {
    between(random, ((most / 4).max(1), most))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(seed: u64) -> Workload {
        Workload {
            model: KvModel::new("llama3.1-8b", 1).unwrap(),
            users: 200,
            seed,
            has_multi_turn: true,
            has_shared_prompts: true,
            requests_max: None,
            documents: Documents::default(),
            phases: Phases::Both,
            recorded: None,
            settings: WorkloadSettings::default(),
        }
    }

    fn requests(workload: &Workload, user: u32, count: usize) -> Vec<PlannedRequest> {
        let mut plan = UserPlan::new(workload, user);
        (0..count).map(|_| plan.next_request(workload)).collect()
    }

    #[test]
    fn a_seed_determines_the_requests_of_each_user_alone() {
        let one = workload(42);
        let fewer = Workload { users: 3, ..one.clone() };
        assert_eq!(requests(&one, 2, 100), requests(&fewer, 2, 100));
        assert_ne!(requests(&one, 2, 100), requests(&one, 1, 100));
        assert_ne!(requests(&one, 2, 100), requests(&workload(43), 2, 100));
    }

    #[test]
    fn requests_have_the_published_ranges_and_shares() {
        let workload = workload(7);
        let all: Vec<_> = (0..200).flat_map(|user| requests(&workload, user, 40)).collect();
        let share = |is: &dyn Fn(&PlannedRequest) -> bool| {
            all.iter().filter(|it| is(it)).count() as f64 / all.len() as f64
        };
        for request in &all {
            assert!((128..=25_000).contains(&request.context_tokens), "{request:?}");
            assert!((12..=800).contains(&request.generated_tokens), "{request:?}");
            assert!(request.turn <= 50);
            let think = request.think.as_secs_f64();
            assert!((0.08..=1.8).contains(&think), "{request:?}");
            let tokens = request.total_blocks * workload.model.block_tokens;
            assert!(tokens <= CONTEXT_TOKENS_MAX, "{request:?}");
        }
        let first = |it: &PlannedRequest| it.turn == 1;
        let with_prompt = |it: &PlannedRequest| it.turn == 1 && it.prompt.is_some();
        let prompts = share(&with_prompt) / share(&first);
        assert!((prompts - 0.2).abs() < 0.03, "{prompts}");
        let interactive = share(&|it| it.class == QosClass::Interactive);
        assert!((interactive - 0.15).abs() < 0.08, "{interactive}");
        let reads = |it: &PlannedRequest| it.decode_reads();
        assert!(all.iter().all(|it| reads(it) == it.generated_tokens.div_ceil(32)));
    }

    #[test]
    fn a_turn_starts_where_the_one_before_it_ended() {
        let workload = workload(1);
        for user in 0..50 {
            for pair in requests(&workload, user, 60).windows(2) {
                let (before, after) = (&pair[0], &pair[1]);
                if after.conversation == before.conversation {
                    assert_eq!(after.turn, before.turn + 1);
                    assert_eq!(after.earlier_blocks, before.total_blocks);
                    assert_eq!(after.prompt, before.prompt);
                } else {
                    assert_eq!((after.turn, after.earlier_blocks), (1, 0));
                    assert_eq!(after.conversation, before.conversation + 1);
                }
            }
        }
    }

    #[test]
    fn without_turns_and_prompts_each_request_is_a_conversation_of_its_own() {
        let workload = Workload { has_multi_turn: false, has_shared_prompts: false, ..workload(1) };
        let all = requests(&workload, 0, 50);
        assert!(all.iter().all(|it| it.turn == 1 && it.prompt.is_none()));
    }

    #[test]
    fn documents_change_nothing_else() {
        let without = workload(5);
        let with = Workload { documents: Documents { count: 10 }, ..without.clone() };
        let plain = |it: PlannedRequest| PlannedRequest { retrieval: None, ..it };
        let (one, other) = (requests(&without, 3, 80), requests(&with, 3, 80));
        assert!(other.iter().any(|it| it.retrieval.is_some()));
        assert_eq!(one, other.into_iter().map(plain).collect::<Vec<_>>());
    }

    #[test]
    fn with_decode_alone_a_user_reads_its_first_context() {
        let both = workload(5);
        let decode = Workload { phases: Phases::DecodeOnly, ..both.clone() };
        let first = requests(&both, 4, 1).remove(0);
        for (number, request) in requests(&decode, 4, 20).into_iter().enumerate() {
            assert_eq!((request.number, request.new_blocks()), (number as u64, 0));
            assert_eq!(request.total_blocks, first.total_blocks);
            assert_eq!(request.prompt, first.prompt);
        }
    }

    #[test]
    fn a_limited_number_of_requests_is_divided_among_users() {
        let workload = Workload { users: 7, requests_max: Some(24), ..workload(1) };
        let of_users: Vec<_> = (0..7).map(|user| workload.requests_of(user).unwrap()).collect();
        assert_eq!(of_users, [4, 4, 4, 3, 3, 3, 3]);
        let whole = (0..7).flat_map(|user| {
            let count = usize::try_from(workload.requests_of(user).unwrap()).unwrap();
            requests(&workload, user, count)
        });
        let blocks: u64 = whole.map(|it| it.new_blocks()).sum();
        let prompts: u64 = (0..3).map(|prompt| workload.prompt_blocks(prompt)).sum();
        assert_eq!(workload.stored_bytes(), (blocks + prompts) * (4 << 20));
    }
}
