"""A message as bytes: head, id, headers, body, and where a backend keeps them. Imports system and policies.

record, name = encoding.encode(destination, b"...", headers, message_id, limit)
"""
