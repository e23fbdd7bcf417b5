//! A client of a world of the transport: posts batches, waits for them, and checks each result.

mod batches;
mod results;

use std::io::ErrorKind;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cascade_runtime::simulated::Random;
use cascade_runtime::{Deadline, now, sleep};
use cascade_transport::{Endpoint, EndpointConfig, TransportError};

use super::living::Living;
use super::process::{Linked, Process};
use super::profile::Trouble;
use super::shared::{Phase, Shared, StreamNumbers, host, soon};
use super::slot::Slot;

use batches::InFlight;

/// Attempts to connect at the end.
const ATTEMPTS_MAX: u32 = 20;
/// How much longer than its deadline a call may take: a thread that sends looks every 50 ms.
const LATENESS_MAX: Duration = Duration::from_millis(150);
/// With several streams: a cancel waits as long for their threads, and then ends them.
const STREAMS_LATENESS_MAX: Duration = Duration::from_millis(200);
/// Pause between them, at first.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(50);

/// A client of a process.
pub(super) struct Caller {
    shared: Arc<Shared>,
    living: Arc<Living>,
    process: Arc<Process>,
    /// Among those of its process.
    client: usize,
    random: Random,
    /// Its own memory: one slot for each batch in flight.
    local: Vec<Slot>,
    in_flight: Vec<Option<InFlight>>,
}

impl Caller {
    pub(super) fn new(
        living: &Arc<Living>,
        process: &Arc<Process>,
        client: usize,
        random: Random,
    ) -> Self {
        let shared = &living.shared;
        let profile = &shared.profile;
        let slots = profile.slots;
        Self {
            local: vec![Slot::new(vec![0; profile.slot_bytes]); slots],
            in_flight: (0..slots).map(|_| None).collect(),
            shared: Arc::clone(shared),
            living: Arc::clone(living),
            process: Arc::clone(process),
            client,
            random,
        }
    }

    pub(super) fn number(&self) -> usize {
        self.client
    }

    fn has(&self, trouble: Trouble) -> bool {
        self.shared.profile.trouble >= trouble && self.shared.phase() == Phase::Operations
    }

    pub(super) fn run(mut self) {
        while self.shared.next_operation() {
            self.operate();
        }
        (0..self.local.len()).for_each(|slot| self.finish(slot));
        self.process.busy.fetch_sub(1, Ordering::Relaxed);
        self.shared.wait_for(Phase::Calm);
        self.reach_all();
        (0..self.local.len()).for_each(|slot| self.check_local(slot));
    }

    fn operate(&mut self) {
        let slot = self.random.index_below(self.local.len());
        match self.random.below(100) {
            0..60 => {
                self.finish(slot);
                self.post(slot);
                if self.random.one_in(2) {
                    self.finish(slot);
                }
            }
            60..80 => self.finish(slot),
            80..85 => self.post_bad(slot),
            85..90 => {
                let target = self.other();
                let slots = target.slots().len();
                let slot = self.random.index_below(slots);
                target.check_slot(&self.shared, slot, "in between");
            }
            90..93 => sleep(Duration::from_micros(self.random.below(5000))),
            93 if self.has(Trouble::Haste) => self.close_link(),
            94 if self.has(Trouble::Haste) && self.random.one_in(4) => {
                // This client receives no answers meanwhile.
                sleep(Duration::from_secs(self.random.below(15)));
            }
            95 if self.has(Trouble::Breaks) && self.random.one_in(4) => self.listen_again(),
            96 if self.shared.profile.has_token => self.connect_stranger(),
            97..99 => self.unregister(),
            _ => self.look(),
        }
    }

    /// Another process, if it lives.
    fn other(&mut self) -> Arc<Process> {
        let mut living = self.living.all();
        living.retain(|process| process.number != self.process.number);
        if living.is_empty() {
            return Arc::clone(&self.process);
        }
        let at = self.random.index_below(living.len());
        living.swap_remove(at)
    }

    /// The number of another process, which may have been killed.
    fn target(&mut self) -> usize {
        let others = self.shared.profile.processes - 1;
        let at = self.random.index_below(others);
        if at >= self.process.number { at + 1 } else { at }
    }

    /// Calls what has a deadline, and checks that it keeps it.
    fn timed<T>(&self, what: &str, deadline: Deadline, call: impl FnOnce() -> T) -> T {
        let frozen = || self.shared.network.frozen(&host(self.process.number));
        let (began, before) = (now(), frozen());
        let result = call();
        let end = deadline.time().max(began) + frozen().saturating_sub(before);
        let late = now().saturating_sub(end);
        let has_streams = self.shared.profile.streams > 1;
        if late > if has_streams { STREAMS_LATENESS_MAX } else { LATENESS_MAX } {
            let had = deadline.time().saturating_sub(began);
            let text = format!(
                "client {}/{}: {what} with a time-out of {had:?} ended {late:?} after its deadline",
                self.process.number, self.client
            );
            self.shared.add(text);
        }
        result
    }

    /// A deadline: short ones only where calls may fail.
    fn deadline(&mut self) -> Deadline {
        if !self.has(Trouble::Haste) || self.random.one_in(2) {
            return soon();
        }
        let most = [100, 5000, 1_000_000][self.random.index_below(3)];
        Deadline::at(now() + Duration::from_micros(self.random.below(most)))
    }

    /// A connection to a process: the one that the clients share, or a new one.
    fn linked(&mut self, to: usize) -> Option<Arc<Linked>> {
        if let Some(linked) = self.process.link(to)
            && linked.connection.is_open()
        {
            return Some(linked);
        }
        let linked = Arc::new(self.connect(to)?);
        self.process.set_link(to, Some(Arc::clone(&linked)));
        Some(linked)
    }

    fn connect(&mut self, to: usize) -> Option<Linked> {
        let deadline = self.deadline();
        let (from, to_host) = (host(self.process.number), host(to));
        let process = Arc::clone(&self.process);
        let network = self.shared.network.clone();
        let numbers = StreamNumbers::default();
        let connected = self.timed("a connect", deadline, || {
            let (to_host, numbers) = (to_host.clone(), Arc::clone(&numbers));
            let dial = move |deadline| {
                let dialled = network.connect(&from, &to_host, deadline)?;
                let mut numbers = numbers.lock().unwrap_or_else(PoisonError::into_inner);
                numbers.push(dialled.number());
                Ok(dialled)
            };
            let dialled = dial(deadline)?;
            let number = dialled.number();
            let connection = process.endpoint.connect_simulated(dialled, dial, deadline)?;
            Ok((connection, number))
        });
        let (connection, number) = match connected {
            Ok(connected) => connected,
            Err(error) => {
                self.failed_to_connect(&error, deadline);
                sleep(Duration::from_micros(self.random.below(20_000)));
                return None;
            }
        };
        self.shared.count("connections");
        self.shared.add_streams(number, numbers);
        let Some(target) = self.living.of_endpoint(connection.peer().id) else {
            self.shared.add(format_args!("connected to an unknown endpoint at {to_host}"));
            return None;
        };
        let offered: Vec<_> = connection.peer().regions.iter().map(|it| it.id).collect();
        let regions = target.regions;
        // Beside those that come and go.
        if !offered.starts_with(&[regions.shared, regions.sink, regions.source]) {
            self.shared.add(format_args!("{to_host} offered {offered:?}"));
        }
        Some(Linked { connection, number, target })
    }

    fn failed_to_connect(&self, error: &TransportError, deadline: Deadline) {
        let is_late = now() >= deadline.time();
        let is_allowed = match error {
            TransportError::Deadline { .. } => is_late,
            TransportError::Connect { source, .. } if source.kind() == ErrorKind::TimedOut => {
                is_late
            }
            // A flipped bit can make any message one that does not fit.
            TransportError::Handshake { reason, .. } => {
                let has_no_place = reason.contains("connections to it")
                    || reason.contains("connections, which is its limit");
                self.has(Trouble::Damage) || self.shared.profile.has_few_places() && has_no_place
            }
            // The handshake stalls.
            TransportError::Lost { .. } => true,
            TransportError::Connect { .. } => self.has(Trouble::Breaks),
            // No thread for heartbeats.
            TransportError::Unavailable(_) => self.shared.profile.fails_threads,
            _ => false,
        };
        let is_allowed = is_allowed && self.has(Trouble::Haste);
        self.shared.count("failed connections");
        if !is_allowed && self.shared.phase() == Phase::Operations {
            self.shared.add(format_args!("a connect failed: {error}"));
        }
    }

    /// Closes a shared connection, in the middle of what others do.
    fn close_link(&mut self) {
        let to = self.target();
        let Some(linked) = self.process.link(to) else { return };
        if self.random.one_in(2) {
            linked.connection.close();
        }
        self.process.set_link(to, None);
    }

    fn listen_again(&mut self) {
        if self.process.stop_listening(&self.shared) {
            sleep(Duration::from_micros(self.random.below(3000)));
            self.process.listen(&self.shared);
        }
    }

    /// An endpoint that does not know the token is refused.
    fn connect_stranger(&mut self) {
        let token = self.random.one_in(2).then(|| b"the token of another world".to_vec());
        let config = EndpointConfig {
            token,
            limits: self.shared.profile.limits,
            ..EndpointConfig::default()
        };
        let stranger = Endpoint::new(config).expect("the configuration is valid");
        let deadline = self.deadline();
        let (from, to) = (host(self.process.number), self.target());
        let connected = self.timed("a connect", deadline, || {
            let (network, to) = (self.shared.network.clone(), host(to));
            let dial = move |deadline| network.connect(&from, &to, deadline);
            stranger.connect_simulated(dial(deadline)?, dial, deadline)
        });
        self.shared.count("strangers");
        if connected.is_ok() {
            self.shared.add("an endpoint without the token was admitted");
        }
    }

    /// Unregisters a region of its process that peers may be reading, and registers another one.
    fn unregister(&mut self) {
        // `unregister` waits until the batches of this client have ended, too.
        (0..self.local.len()).for_each(|slot| self.finish(slot));
        let process = Arc::clone(&self.process);
        let Some(id) = process.passing.begin_to_go() else { return };
        let mut deadline = self.deadline();
        loop {
            let unregister = || process.endpoint.unregister(id, deadline);
            match self.timed("an unregister", deadline, unregister) {
                Ok(()) => break,
                Err(TransportError::InUse(_)) if self.has(Trouble::Haste) => {
                    // It is unregistered all the same: another call returns at once.
                    deadline = soon();
                }
                Err(error) => {
                    self.shared.add(format_args!("a region was not unregistered: {error}"));
                    break;
                }
            }
        }
        process.passing.gone(id);
        self.shared.count("unregistered");
        process.passing.register(&process.endpoint);
    }

    /// Calls that only look.
    fn look(&mut self) {
        let to = self.target();
        if let Some(linked) = self.process.link(to) {
            let is_open = linked.connection.is_open();
            if !is_open && !self.has(Trouble::Haste) {
                self.shared.add("a connection is not open, though nothing disturbed it");
            }
        }
    }

    /// At the end, when nothing disturbs any more, each client reaches each process.
    fn reach_all(&mut self) {
        self.process.close_links();
        let own = self.process.number;
        for to in (0..self.shared.profile.processes).filter(|to| *to != own) {
            // A peer that serves as many as it may has to end some first.
            let mut attempts = (0..ATTEMPTS_MAX).map(|attempt| {
                sleep(ATTEMPT_PAUSE * attempt);
                self.connect(to)
            });
            let Some(linked) = attempts.find_map(|linked| linked) else {
                self.shared.add(format_args!("at the end, host {to} cannot be reached"));
                continue;
            };
            self.post_to(0, Arc::new(linked));
            self.finish(0);
        }
    }
}
