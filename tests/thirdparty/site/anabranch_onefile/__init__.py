"""A third party's store, as small as one can be: all of it is one file, which is written anew at every change.

    stores:
      - name: notes
        match: ["queue://notes.>"]
        onefile: {max_messages: 1000}

It is slow (each change costs the time that the whole store takes to write) and plainly right: a write makes new
contents out of the old ones, writes them beside the old file, syncs, renames, and is seen from then on. All else,
from who holds which message to prepared transactions, is Anabranch's core (anabranch.adapters.core). See
docs/adapters.md.
"""

from anabranch.adapters.core import Store

from .backend import OneFileBackend, OneFileOptions


class OneFileStore(Store):
    backend_type = OneFileBackend
    options_model = OneFileOptions


__all__ = ["OneFileOptions", "OneFileStore"]
