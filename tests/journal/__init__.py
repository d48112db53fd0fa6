"""The journal store from inside: its bytes, its recovery, what it frees, what it refuses."""
