"""The memory store from inside: chunks, swap files, and that memory is bounded."""
