//! Conversations as text (ShareGPT): each answer is a request with all text before it.
//!
//! Only lengths are kept. Four characters count as one token. The trace has no times.

use std::time::Duration;

use super::field::{TraceObject, shown};
use super::parser::{Parser, RowOutcome};
use super::{REQUEST_BLOCKS_MAX, SkipReason, TraceError, TraceFormat, TraceRequest, limit};

const CHARACTERS_OF_A_TOKEN: usize = 4;
/// Who answers, in the data sets that have this form.
const ANSWERS: [&str; 6] = ["gpt", "chatgpt", "assistant", "model", "bing", "bard"];

pub(super) fn row(
    parser: &mut Parser,
    format: TraceFormat,
    object: TraceObject<'_>,
) -> Result<RowOutcome, TraceError> {
    let block_tokens = format.block_tokens();
    parser.check_block_tokens(object.file, block_tokens)?;
    if object.optional("conversations").is_none() {
        return Ok(RowOutcome::Skipped(SkipReason::NoConversations));
    }
    let mut conversation = Conversation { block_tokens, ..Conversation::default() };
    for (index, turn) in object.list("conversations", "a list of turns")?.iter().enumerate() {
        let prefix = format!("conversations[{index}].");
        let turn = TraceObject { prefix: &prefix, value: turn, ..object };
        if !turn.value.is_object() {
            return Err(turn.error("", "a JSON object", shown(turn.value)));
        }
        let role = turn.required_text("from")?;
        let tokens = tokens_of(turn.required_text("value")?);
        if !ANSWERS.contains(&role) {
            conversation.question_tokens += tokens;
            continue;
        }
        if conversation.question_tokens > 0 {
            conversation.answer(parser, object.file, tokens)?;
        }
        conversation.tokens += tokens;
    }
    Ok(match conversation.session {
        Some(_) => RowOutcome::Read,
        None => RowOutcome::Skipped(SkipReason::NoTurns),
    })
}

#[derive(Debug, Default)]
struct Conversation {
    block_tokens: u32,
    session: Option<u32>,
    /// Tokens of all turns with their answers.
    tokens: u64,
    /// Tokens since the last answer.
    question_tokens: u64,
    /// Its full blocks. All its requests begin with them.
    chain: Vec<u64>,
}

impl Conversation {
    /// Adds the request of an answer.
    fn answer(
        &mut self,
        parser: &mut Parser,
        file: &str,
        answer_tokens: u64,
    ) -> Result<(), TraceError> {
        self.tokens += std::mem::take(&mut self.question_tokens);
        let block_tokens = u64::from(self.block_tokens);
        let blocks_max = REQUEST_BLOCKS_MAX as u64;
        let what = "the number of tokens of a conversation";
        limit(file, what, self.tokens, blocks_max * block_tokens)?;
        let has_partial_tail = !self.tokens.is_multiple_of(block_tokens);
        let full = usize::try_from(self.tokens / block_tokens).unwrap_or(usize::MAX);
        parser.count_made_blocks(file, full as u64 + u64::from(has_partial_tail))?;
        while self.chain.len() < full {
            self.chain.push(parser.new_block());
        }
        let mut blocks = self.chain.clone();
        // With more tokens, a block that is not full becomes another block.
        blocks.extend(has_partial_tail.then(|| parser.new_block()));
        let session = *self.session.get_or_insert_with(|| parser.new_session());
        parser.push(TraceRequest {
            at: Duration::ZERO,
            blocks,
            input_tokens: u32::try_from(self.tokens).unwrap_or(u32::MAX),
            output_tokens: u32::try_from(answer_tokens).unwrap_or(u32::MAX),
            partial_tail: has_partial_tail,
            session: Some(session),
            stop: None,
        });
        Ok(())
    }
}

fn tokens_of(text: &str) -> u64 {
    (text.chars().count() / CHARACTERS_OF_A_TOKEN).max(1) as u64
}
