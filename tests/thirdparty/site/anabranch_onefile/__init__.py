"""A third party's store, as small as one can be: all of it is one file, which is written anew at every change.

    stores:
      - name: notes
        match: ["queue://notes.>"]
        onefile: {max_messages: 1000}

It is slow (each change costs the time that the whole store takes to write) and plainly right: an operation makes new
contents out of the old ones, writes them beside the old file, syncs, renames, and is seen from then on. Who holds
which message is Anabranch's part (anabranch.adapters.delivery). See docs/adapters.md.
"""

from .store import OneFileOptions, OneFileStore

__all__ = ["OneFileOptions", "OneFileStore"]
