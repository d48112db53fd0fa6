"""The page of `anabranch ui`: what a directory holds and what happens there, in a browser on this machine.

    anabranch ui data

`command` is the command, `server` lets in who has the token, `figures` asks the router for what other commands show,
`advice` lets `anabranch recommend` make its report, and `page.html` is all that the browser gets: one file, with its
style and its script.

Whoever has the token sees what the user of the process may see. Other users of the machine reach the port too, and so
does any page in the user's browser. So each request needs the token in a header, which no other origin can send; the
address has it behind the `#`, which browsers send nobody. No cookie is used: it would go to all ports of the machine.
"""
