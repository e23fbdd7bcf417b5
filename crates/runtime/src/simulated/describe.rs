//! Descriptions of threads for verdicts: who waits for what, and who holds it.

use super::World;
use super::threads::{State, Thread};
use super::wait::{LockKind, Reason, Wait};

impl World {
    /// One line for each thread that has neither ended nor been killed.
    pub fn describe_threads(&self) -> String {
        let threads = self.threads.borrow();
        let live = threads.iter().filter(|thread| !thread.is_over());
        let lines = live.map(|thread| match &thread.state {
            State::Waiting(wait) => {
                let location = wait.location;
                let what = describe_wait(wait, &threads);
                format!("`{}` waits for {what} at {location}", thread.name)
            }
            _ => format!("`{}` is runnable and had {} turns", thread.name, thread.turns),
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

fn describe_wait(wait: &Wait, threads: &[Thread]) -> String {
    match wait.reason {
        Reason::Lock(kind, lock) => {
            let name = match kind {
                LockKind::Mutex => "a mutex",
                LockKind::Read => "a lock to read",
                LockKind::Write => "a lock to write",
            };
            format!("{name} held by {}", describe_holders(lock, threads))
        }
        Reason::Notification(_) if wait.has_time_limit => "a notification or a time-out".to_owned(),
        Reason::Notification(_) => "a notification".to_owned(),
        Reason::EndOf(number) => format!("the end of `{}`", threads[number as usize].name),
        Reason::Time => "a time".to_owned(),
        Reason::Kill => "a crash".to_owned(),
    }
}

fn describe_holders(lock: usize, threads: &[Thread]) -> String {
    let holds = threads.iter().flat_map(|thread| thread.held.iter().map(move |it| (thread, it)));
    let names = holds.filter(|(_, held)| held.lock == lock).map(|(thread, held)| {
        let over = match thread.state {
            State::Ended => ", which has ended,",
            State::Killed => ", which was killed,",
            State::Runnable | State::Waiting(_) => "",
        };
        format!("`{}`{over} since {}", thread.name, held.location)
    });
    let names: Vec<String> = names.collect();
    if names.is_empty() {
        return "no thread, while a writer waits".to_owned();
    }
    names.join(" and ")
}
