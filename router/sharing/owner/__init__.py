"""The owner's side of a shared directory.

process         the process, and its successor
server          who comes in, and the thread that serves; loop is what that waits at
rounds          what clients ask, a round at a time; answers go together at its end
session         what is kept of one client
presence        clients that come, come again and go: their leases
writing         the round's sends and acks, which share their waits for the disk
reading         receives, also those that wait; listeners
commits         whole transactions
calls           all else that is asked, by name
bodies          large bodies that clients send
control         the way in to a router that has its directory for itself
"""
