"""A client's side of a shared directory.

router          the router: Router's own methods over what follows
registry        what those look up: one store for all destinations
store           that store; its base is in leases
leases          what this client holds, and how it ends
bodies          large bodies, which the owner keeps
listeners       callbacks
maps            keyed values
transactions    the coordinator, which lets the owner decide
inspecting      what the commands ask
connection      drives the exchange by the threads that call, over one owner and the next (an event loop: router/aio)
greeting        how an owner is found, or started
heartbeat       what is said of one that does not answer
exchange        requests and their answers, and what is sent again: no input or output of its own
"""
