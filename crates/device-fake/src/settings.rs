//! What to fake: the variables of the environment.

/// A call that fails.
#[derive(Debug)]
struct Failure {
    name: String,
    code: i32,
    /// Which of the calls; none for each.
    call: Option<u64>,
}

/// What to fake.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) version: i32,
    pub(crate) devices: i32,
    pub(crate) bytes: usize,
    absent: Vec<String>,
    failures: Vec<Failure>,
    delays_us: Vec<(String, u64)>,
    attributes: Vec<(u32, i32)>,
    pub(crate) held: Vec<String>,
    pub(crate) die_at_copy: Option<u64>,
    pub(crate) seed: u64,
    /// Whether devices can access each other's memory.
    pub(crate) has_peers: bool,
    /// Kernels write a wrong first byte to fragments of this length.
    pub(crate) spoiled_length: Option<usize>,
    pub(crate) report: Option<String>,
    /// A file with the bytes that other processes have taken, read at each question.
    taken: Option<String>,
}

impl Settings {
    pub(crate) fn read() -> Self {
        Self {
            version: number("VERSION", 13_000),
            devices: number("DEVICES", 1),
            bytes: number("BYTES", 1 << 30),
            absent: list("ABSENT"),
            failures: list("FAIL").iter().filter_map(|text| failure(text)).collect(),
            delays_us: list("DELAY_US").iter().filter_map(|text| delay(text)).collect(),
            attributes: list("ATTRIBUTE").iter().filter_map(|text| attribute(text)).collect(),
            held: list("HOLD"),
            die_at_copy: variable("DIE_AT_COPY").and_then(|text| text.parse().ok()),
            seed: number("SEED", 1),
            has_peers: number("PEERS", 0) != 0,
            spoiled_length: variable("SPOIL_LENGTH").and_then(|text| text.parse().ok()),
            report: variable("REPORT"),
            taken: variable("TAKEN"),
        }
    }

    /// Memory that other processes have taken.
    pub(crate) fn taken_bytes(&self) -> usize {
        let text = self.taken.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    pub(crate) fn is_absent(&self, name: &str) -> bool {
        self.absent.iter().any(|absent| absent == name)
    }

    /// The error of a call, by the numbers of calls of this function and of all.
    pub(crate) fn failure(&self, name: &str, of_it: u64, of_all: u64) -> Option<i32> {
        let fails = |failure: &&Failure| {
            let number = if failure.name == "*" { of_all } else { of_it };
            let is_named = failure.name == name || failure.name == "*";
            is_named && failure.call.is_none_or(|call| call == number)
        };
        self.failures.iter().find(fails).map(|failure| failure.code)
    }

    /// The value of a device's attribute, if one was set.
    pub(crate) fn attribute(&self, number: u32) -> Option<i32> {
        let set = self.attributes.iter().find(|(set, _)| *set == number);
        set.map(|(_, value)| *value)
    }

    pub(crate) fn delay_us(&self, name: &str) -> u64 {
        let delay = self.delays_us.iter().find(|(delayed, _)| delayed == name || delayed == "*");
        delay.map_or(0, |(_, time)| *time)
    }
}

#[expect(clippy::disallowed_methods, reason = "a driver has no other settings")]
fn variable(name: &str) -> Option<String> {
    std::env::var(format!("FAKE_CUDA_{name}")).ok().filter(|text| !text.is_empty())
}

fn number<T: std::str::FromStr>(name: &str, default: T) -> T {
    variable(name).and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn list(name: &str) -> Vec<String> {
    let text = variable(name).unwrap_or_default();
    text.split(',').filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

fn failure(text: &str) -> Option<Failure> {
    let (name, rest) = text.split_once('=')?;
    let (code, call) = rest.split_once('@').map_or((rest, None), |(code, call)| (code, Some(call)));
    let call = call.and_then(|call| call.parse().ok());
    Some(Failure { name: name.to_owned(), code: code.parse().ok()?, call })
}

fn delay(text: &str) -> Option<(String, u64)> {
    let (name, time) = text.split_once('=')?;
    Some((name.to_owned(), time.parse().ok()?))
}

fn attribute(text: &str) -> Option<(u32, i32)> {
    let (number, value) = text.split_once('=')?;
    Some((number.parse().ok()?, value.parse().ok()?))
}
