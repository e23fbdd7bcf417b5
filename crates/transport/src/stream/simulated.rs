//! A network in memory, on the time of a simulated world: hosts by name, listeners, connections
//! with faults.

mod conditions;
mod host;
mod pair;
mod pipe;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_runtime::simulated::Random;
use cascade_runtime::{Condvar, Deadline, LeafMutex, Mutex, now, sleep};

use super::accept::{Accepting, listen_error};
use super::socket::{Socket, refused};
use crate::TransportError;
use crate::state::EndpointState;
use host::Host;
use pair::{CLIENT, Pair, SERVER, SimulatedStream, note};

pub use conditions::Conditions;

/// A network in memory. Clones share it.
///
/// Hosts have names. What happens is drawn from a seed. It works on virtual time: use it in a
/// simulated world.
#[derive(Clone)]
pub struct Network(Arc<LeafMutex<State>>);

struct State {
    random: Random,
    conditions: Conditions,
    hosts: BTreeMap<String, Arc<Host>>,
    listeners: BTreeMap<String, Arc<Listening>>,
    /// All connections that were ever made, by their numbers.
    pairs: Vec<Arc<Pair>>,
    /// Hosts that are apart, and until when.
    apart: BTreeMap<BTreeSet<String>, Duration>,
    /// The ends of connections on which nothing is sent.
    silent: Vec<SimulatedStream>,
}

/// Connections that wait to be accepted.
#[derive(Debug, Default)]
struct Listening {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<SimulatedStream>,
    is_over: bool,
}

/// A connected stream of a simulated network, for [`crate::Endpoint::connect_simulated`].
#[derive(Debug)]
pub struct Dialled {
    stream: SimulatedStream,
    number: u64,
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network").finish_non_exhaustive()
    }
}

impl Network {
    /// A network without hosts.
    pub fn new(random: Random) -> Self {
        Self(Arc::new(LeafMutex::new(State {
            random,
            conditions: Conditions::default(),
            hosts: BTreeMap::new(),
            listeners: BTreeMap::new(),
            pairs: vec![],
            apart: BTreeMap::new(),
            silent: vec![],
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what happens to connections that are made from now on.
    pub fn set_conditions(&self, conditions: Conditions) {
        self.state().conditions = conditions;
    }

    /// Stops the process of a host for this time: its calls on sockets wait.
    pub fn freeze(&self, host: &str, time: Duration) {
        note(4, 0);
        let host = self.state().host(host);
        host.freeze(time);
    }

    /// How long a host was frozen so far, all times together.
    pub fn frozen(&self, host: &str) -> Duration {
        let host = self.state().host(host);
        host.frozen()
    }

    /// Lets nothing pass between two hosts for this time. What is sent meanwhile arrives later.
    pub fn part(&self, hosts: [&str; 2], time: Duration) {
        note(5, 0);
        let until = now() + time;
        let mut state = self.state();
        state.apart.insert(hosts.map(str::to_owned).into(), until);
        let pairs = state.pairs_between(hosts);
        drop(state);
        for pair in &pairs {
            pair.close_until(until);
        }
    }

    /// Resets all connections of a host.
    pub fn reset(&self, host: &str) {
        let pairs = self.state().pairs_of(host);
        for pair in &pairs {
            pair.reset();
        }
    }

    /// The process of a host was killed: its listener and its ends of connections are gone.
    pub fn kill(&self, host: &str) {
        note(6, 0);
        let (listening, pairs) = {
            let mut state = self.state();
            state.host(host).thaw();
            (state.listeners.remove(host), state.pairs_of(host))
        };
        if let Some(listening) = listening {
            listening.end();
        }
        for pair in pairs {
            for end in [CLIENT, SERVER].into_iter().filter(|end| pair.names[*end] == host) {
                pair.end(end, true);
            }
        }
    }

    /// Ends what disturbs the network: hosts that are frozen or apart, and silent connections.
    pub fn calm(&self) {
        let (hosts, pairs, silent) = {
            let mut state = self.state();
            state.conditions = Conditions::default();
            state.apart.clear();
            let hosts: Vec<_> = state.hosts.values().cloned().collect();
            (hosts, state.pairs.clone(), std::mem::take(&mut state.silent))
        };
        for host in &hosts {
            host.thaw();
        }
        for pair in &pairs {
            pair.open();
        }
        drop(silent);
    }

    /// Whether the end of this connection that listened takes no more bytes: its process has closed
    /// it, or was killed.
    pub fn has_ended(&self, connection: u64) -> bool {
        let index = usize::try_from(connection).unwrap_or(usize::MAX);
        let pair = self.state().pairs.get(index).map(Arc::clone);
        pair.is_none_or(|pair| pair.has_ended(SERVER))
    }

    /// Connects a host to the listener of another one.
    ///
    /// # Errors
    /// If none listens there, the attempt is refused, or the deadline passes.
    pub fn connect(
        &self,
        from: &str,
        to: &str,
        deadline: Deadline,
    ) -> Result<Dialled, TransportError> {
        let host = self.state().host(from);
        host.wait();
        let failed = |kind: io::ErrorKind| Err(refused(to, kind.into()));
        let (round_trip, open, is_refused, is_twice) = self.state().draw_attempt([from, to]);
        let arrives = open.max(now()) + round_trip;
        sleep(arrives.min(deadline.time()).saturating_sub(now()));
        if arrives > deadline.time() {
            return failed(io::ErrorKind::TimedOut);
        }
        let mut state = self.state();
        let listening = state.listeners.get(to).cloned();
        let Some(listening) = listening.filter(|_| !is_refused) else {
            drop(state);
            return failed(io::ErrorKind::ConnectionRefused);
        };
        let pair = state.pair([from, to]);
        let silent = is_twice.then(|| state.pair([from, to]));
        drop(state);
        note(7, pair.number);
        for pair in [Some(&pair), silent.as_ref()].into_iter().flatten() {
            listening.push(pair.stream(SERVER));
        }
        if let Some(silent) = silent {
            let stream = silent.stream(CLIENT);
            self.state().silent.push(stream);
        }
        let number = pair.number;
        Ok(Dialled { stream: pair.stream(CLIENT), number })
    }

    /// Accepts connections to a host, for an endpoint.
    pub(crate) fn listen(
        &self,
        endpoint: &Arc<EndpointState>,
        host: &str,
    ) -> Result<Accepting, TransportError> {
        let refused = |error: io::Error| listen_error(host, &error);
        let listening = Arc::new(Listening::default());
        let of_host = {
            let mut state = self.state();
            if state.listeners.contains_key(host) {
                return Err(refused(io::ErrorKind::AddrInUse.into()));
            }
            state.listeners.insert(host.to_owned(), Arc::clone(&listening));
            state.host(host)
        };
        let (ended, accepting) = (Arc::clone(&listening), Arc::clone(&listening));
        let (network, name) = (self.clone(), host.to_owned());
        let end = move || network.end_listener(&name, &ended);
        let accept = move || accepting.accept(&of_host).map(Ok);
        let started = Accepting::start(Arc::clone(endpoint), Box::new(end), Box::new(accept));
        if started.is_err() {
            self.end_listener(host, &listening);
        }
        started.map_err(refused)
    }

    fn end_listener(&self, host: &str, listening: &Arc<Listening>) {
        let mut state = self.state();
        // Another process may listen there since.
        if state.listeners.get(host).is_some_and(|it| Arc::ptr_eq(it, listening)) {
            state.listeners.remove(host);
        }
        drop(state);
        listening.end();
    }
}

impl State {
    fn host(&mut self, name: &str) -> Arc<Host> {
        Arc::clone(self.hosts.entry(name.to_owned()).or_default())
    }

    fn open(&self, hosts: [&str; 2]) -> Duration {
        let hosts: BTreeSet<_> = hosts.map(str::to_owned).into();
        self.apart.get(&hosts).copied().unwrap_or_default()
    }

    /// The time of a round trip, when the hosts are together, whether the attempt is refused, and
    /// whether it makes two connections.
    fn draw_attempt(&mut self, hosts: [&str; 2]) -> (Duration, Duration, bool, bool) {
        let (conditions, open) = (self.conditions, self.open(hosts));
        let random = &mut self.random;
        let round_trip = conditions.delay(random) + conditions.delay(random);
        let is_refused = random.one_in(conditions.refuse_one_in);
        (round_trip, open, is_refused, random.one_in(conditions.duplicate_one_in))
    }

    fn pair(&mut self, hosts: [&str; 2]) -> Arc<Pair> {
        let number = self.pairs.len() as u64;
        let random = Random::new(self.random.next_u64(), number);
        let conditions = (self.conditions, random, self.open(hosts));
        let pair =
            Pair::new(number, hosts.map(|it| self.host(it)), hosts.map(str::to_owned), conditions);
        self.pairs.push(Arc::clone(&pair));
        pair
    }

    fn pairs_of(&self, host: &str) -> Vec<Arc<Pair>> {
        let ours = self.pairs.iter().filter(|pair| pair.names.iter().any(|name| name == host));
        ours.cloned().collect()
    }

    fn pairs_between(&self, [one, other]: [&str; 2]) -> Vec<Arc<Pair>> {
        let mut pairs = self.pairs_of(one);
        pairs.retain(|pair| pair.names.iter().any(|name| name == other));
        pairs
    }
}

impl Listening {
    fn push(&self, stream: SimulatedStream) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = if queue.is_over {
            Some(stream)
        } else {
            queue.waiting.push_back(stream);
            None
        };
        drop(queue);
        drop(refused);
        self.changed.notify_one();
    }

    fn accept(&self, host: &Host) -> io::Result<Socket> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        while queue.waiting.is_empty() && !queue.is_over {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        let stream = queue.waiting.pop_front();
        drop(queue);
        host.wait();
        let stream = stream.ok_or(io::ErrorKind::InvalidInput)?;
        let peer = stream.peer();
        Ok(Socket::over(stream, &peer))
    }

    fn end(&self) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.is_over = true;
        let waiting = std::mem::take(&mut queue.waiting);
        drop(queue);
        // The connections that nobody accepted are closed.
        drop(waiting);
        self.changed.notify_all();
    }
}

impl Dialled {
    /// The number of the connection in its network.
    pub fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn into_socket(self) -> Socket {
        let peer = self.stream.peer();
        Socket::over(self.stream, &peer)
    }
}
