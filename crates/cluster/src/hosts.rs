//! The list of hosts: a name and an address in each line.

use thiserror::Error;

/// Most hosts of a list: each lookup asks all of them.
const HOSTS_MAX: usize = 32;
/// Most characters of a name.
const NAME_CHARS_MAX: usize = 64;

/// One node of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Where it answers other nodes: `HOST:PORT`.
    pub address: String,
}

/// A line that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HostsError {
    /// A line cannot be read.
    #[error("line {line}: {reason}; write NAME HOST:PORT, such as `node1 10.0.0.1:9500`")]
    Line {
        /// Its number, from 1 on.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// There are more hosts than a lookup can ask.
    #[error("{count} hosts; the maximum is {HOSTS_MAX}, because each lookup asks all of them")]
    TooMany {
        /// How many there are.
        count: usize,
    },
    /// There are none.
    #[error("it has no hosts; write a line NAME HOST:PORT for each node")]
    Empty,
}

/// Reads a list of hosts. Empty lines and what follows `#` say nothing.
///
/// # Errors
/// The first line that is wrong.
pub fn parse_hosts(text: &str) -> Result<Vec<Host>, HostsError> {
    let mut hosts: Vec<Host> = Vec::new();
    for (raw, line) in text.lines().zip(1..) {
        let wrong = |reason: String| Err(HostsError::Line { line, reason });
        let content = raw.split('#').next().unwrap_or_default();
        let words: Vec<&str> = content.split_whitespace().collect();
        let (name, address) = match words[..] {
            [] => continue,
            [name, address] => (name, address),
            _ => return wrong(format!("{} words", words.len())),
        };
        let is_plain = |it: char| it.is_ascii_alphanumeric() || matches!(it, '-' | '_' | '.');
        if name.chars().count() > NAME_CHARS_MAX || !name.chars().all(is_plain) {
            return wrong(format!(
                "a name has letters, digits, - _ . and at most {NAME_CHARS_MAX}"
            ));
        }
        let port = address.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
        if !matches!(port, Some(Ok(1..))) {
            return wrong(format!("{address:?} has no port"));
        }
        if let Some(other) = hosts.iter().find(|it| it.name == name || it.address == address) {
            return wrong(format!("{} {} is there twice", other.name, other.address));
        }
        hosts.push(Host { name: name.to_owned(), address: address.to_owned() });
    }
    match hosts.len() {
        0 => Err(HostsError::Empty),
        count if count > HOSTS_MAX => Err(HostsError::TooMany { count }),
        _ => Ok(hosts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_are_read() {
        let text = "# two nodes\n\none 10.0.0.1:9500 # the first\n  two\t[fd00::2]:9500\r\n";
        let host = |name: &str, address: &str| Host { name: name.into(), address: address.into() };
        let expected = [host("one", "10.0.0.1:9500"), host("two", "[fd00::2]:9500")];
        assert_eq!(parse_hosts(text), Ok(expected.to_vec()));
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, part) in [
            ("one", "line 1: 1 words; write NAME HOST:PORT"),
            ("\none a:1 b:2", "line 2: 3 words"),
            ("one 10.0.0.1", "\"10.0.0.1\" has no port"),
            ("one 10.0.0.1:0", "has no port"),
            ("one 10.0.0.1:99999", "has no port"),
            ("o/e 10.0.0.1:1", "a name has letters"),
            ("one a:1\none b:1", "line 2: one a:1 is there twice"),
            ("one a:1\ntwo a:1", "line 2: one a:1 is there twice"),
            ("# nothing\n", "no hosts"),
        ] {
            let error = parse_hosts(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
        let many: Vec<String> = (1..=33).map(|at| format!("n{at} h{at}:1")).collect();
        assert_eq!(parse_hosts(&many.join("\n")), Err(HostsError::TooMany { count: 33 }));
    }
}
