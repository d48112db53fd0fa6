"""A client's side of a shared directory.

router          the router: Router's own methods over what follows
store           the one store that it sees; its base is in leases
leases          what this client holds, and how it ends
bodies          large bodies, which the owner keeps
listeners       callbacks
maps            keyed values
transactions    the coordinator, which lets the owner decide
inspecting      what the commands ask
connection      drives the exchange by the threads that call, over one owner and the next
greeting        how an owner is found, or started
exchange        requests and their answers, and what is sent again: no input or output of its own
"""
