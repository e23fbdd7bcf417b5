"""The namespaces of one engine: its manifest, and the generation of its keys."""

import uuid

from cascadekv import Manifest, Namespace

__all__ = ["Namespaces"]


class Namespaces:
    """Makes the namespace of each generation. Any thread may use it."""

    def __init__(self, secret: bytes | None) -> None:
        """Start without a manifest; `secret` is the tenant's."""
        self._secret = secret
        self._made: dict[str, Namespace] = {}
        self.manifest: dict[str, str] = {}
        """The fields of the compatibility manifest."""
        self.generation = ""
        """What makes the current keys unequal to earlier ones; empty if nothing has to."""

    def renew(self) -> None:
        """Start a generation: nothing that is stored is found any more."""
        self.generation = uuid.uuid4().hex

    def current(self) -> Namespace:
        """Return the namespace of the current generation."""
        return self.of(self.generation)

    def of(self, generation: str) -> Namespace:
        """Return the namespace of a generation."""
        # A background thread may ask for a generation while the scheduler starts the next one.
        space = self._made.get(generation)
        if space is None:
            fields = dict(self.manifest)
            if generation:
                fields["generation"] = generation
            space = Namespace(Manifest(fields), self._secret)
            self._made = {generation: space}
        return space
