//! Splits the text of a JSON array into its elements, which are parsed one by one, so that an array
//! takes no more memory than its largest element.

use super::record::Record;

/// Where the reading of an array is.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ArrayState {
    has_begun: bool,
    has_elements: bool,
    pub(super) has_ended: bool,
}

/// What a piece of the file had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Neither the end of the element nor of the array.
    More,
    /// The end of the element.
    Element,
    /// Text after the array.
    Trailing,
}

/// The text of one element so far.
#[derive(Debug)]
pub(super) struct ElementScan {
    pub(super) text: Vec<u8>,
    /// The line of the last byte, from 1.
    pub(super) line: usize,
    begin: usize,
    depth: u32,
    is_in_string: bool,
    is_escaped: bool,
}

impl ElementScan {
    pub(super) fn new(line: usize) -> Self {
        let (depth, is_in_string, is_escaped) = (0, false, false);
        Self { text: Vec::new(), line, begin: line, depth, is_in_string, is_escaped }
    }

    pub(super) fn record(self, ends_file: bool) -> Record {
        let line = if self.text.is_empty() { self.line } else { self.begin };
        Record { line, text: self.text, ends_file }
    }

    /// Takes bytes up to the end of the element. Returns how many it took.
    pub(super) fn feed(&mut self, bytes: &[u8], state: &mut ArrayState) -> (usize, Found) {
        for (at, byte) in bytes.iter().enumerate() {
            self.line += usize::from(*byte == b'\n');
            let found = self.byte(*byte, state);
            if found != Found::More {
                return (at + 1, found);
            }
        }
        (bytes.len(), Found::More)
    }

    fn byte(&mut self, byte: u8, state: &mut ArrayState) -> Found {
        let is_blank = byte.is_ascii_whitespace();
        if state.has_ended {
            return if is_blank { Found::More } else { Found::Trailing };
        }
        if !state.has_begun {
            // The caller has seen the bracket behind white space.
            state.has_begun = byte == b'[';
            return Found::More;
        }
        if self.is_in_string {
            self.is_in_string = self.is_escaped || byte != b'"';
            self.is_escaped = byte == b'\\' && !self.is_escaped;
            self.text.push(byte);
            return Found::More;
        }
        match byte {
            b',' if self.depth == 0 => {
                state.has_elements = true;
                return Found::Element;
            }
            b']' if self.depth == 0 => {
                state.has_ended = true;
                let is_empty_array = self.text.is_empty() && !state.has_elements;
                return if is_empty_array { Found::More } else { Found::Element };
            }
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            b'"' => self.is_in_string = true,
            _ => {}
        }
        if self.text.is_empty() {
            if is_blank {
                return Found::More;
            }
            self.begin = self.line;
        }
        self.text.push(byte);
        Found::More
    }
}
