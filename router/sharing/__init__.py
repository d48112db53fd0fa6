"""One directory, many processes: an owner that serves, and clients that have the same API.

    with anabranch.open("data", shared=True) as router:     # in any number of processes
        router.queue("orders").send(b"...")

protocol        what goes over the socket: requests, messages, errors
socket_file     where the socket is
clients         who lives
starting        the owner's process, and who starts it
owner/          the owner's side: what is asked is in its `rounds`, and begins there
client/         a client's side: what is called is in its `router` and `store`, and goes out at its `connection`

It imports the router's other packages, and none of them imports it: `anabranch.open` and `Router.serve` load it when it
is asked for. Whatever dies, what was acknowledged is durable as its store says: docs/processes.md has it call by call.
"""
