//! What a worker process and its node say to each other: frames and messages. No I/O, no state.
