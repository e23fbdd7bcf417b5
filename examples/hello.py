"""Hello, world: a block under a key of one's own, in this process or in a node.

Run it in an environment with `cascadekv`: `python examples/hello.py`, or with the socket of a
running node: `python examples/hello.py SOCKET`.
"""

import sys

import cascadekv


def main() -> None:
    """Put a block, read it, and see that its bytes do not change."""
    socket = sys.argv[1] if len(sys.argv) > 1 else None
    with cascadekv.connect(socket) if socket else cascadekv.Store(dram="64MiB") as store:
        store.put("greeting", b"Hello, world!")
        print(store.get("greeting"))
        print(store.get("farewell"))  # a miss is None, never an error

        try:
            store.put("greeting", b"Good morning!")
        except cascadekv.ConflictError as refused:
            print(refused)

        store.delete("greeting")
        store.put("greeting", b"Good morning!")
        print(store.get("greeting"))


if __name__ == "__main__":
    main()
