//! What a worker process links: maps the node's pool and talks to the node.
