"""Anabranch: embedded message persistence in partitioned durable stores."""
