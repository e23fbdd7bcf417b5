//! What every stage has to do.
