"""A client's side of a shared directory.

router          the router: Router's own methods over what follows
store           the one store that it sees; its base is in leases
leases          what this client holds, and how it ends
bodies          large bodies, which the owner keeps
listeners       callbacks
maps            keyed values
transactions    the coordinator, which lets the owner decide
inspecting      what the commands ask
connection      requests and their answers, over one owner and the next
"""
