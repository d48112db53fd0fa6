"""One directory, many processes: an owner that serves, and clients that have the same API.

    with anabranch.open("data", shared=True) as router:     # in any number of processes
        router.queue("orders").send(b"...")

protocol, socket_file, clients       what goes over the socket, where it is, who lives
server, session, calls               the owner's side
owner                                the owner's process, and who starts it
connection, remote_store, shared_router     a client's side

It imports the router's other packages, and none of them imports it: `anabranch.open` and `Router.serve` load it when it
is asked for. Whatever dies, what was acknowledged is durable as its store says: docs/processes.md has it call by call.
"""
