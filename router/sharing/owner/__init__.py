"""The owner's side of a shared directory.

server          the loop: sockets, threads, times; who comes in
session         what is kept of one client
presence        clients that come, come again and go: their leases
writing         the round's sends and acks, which share their waits for the disk
reading         receives, also those that wait; listeners
commits         whole transactions
calls           all else that is asked, by name
control         the way in to a router that has its directory for itself
"""
