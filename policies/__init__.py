"""The ground floor: what goes where, and how durable it is. Imports nothing else of ours.

    from anabranch.policies.config import load
    from anabranch.policies.names.destination import Destination

    config = load("stores.yaml")                                   # every error at once, each with its line
    match = config.routes().route(Destination.parse("queue://orders.custom"))
    print(match.target.name, match.pattern.text, match.reason)     # the store, the pattern, why that one

- `names`: destinations, patterns and their order of precedence, tables of routes.
- `config`: the YAML file, its models and options; docs/configuration.md is for its users.
- `compaction`: which files of a journal are compacted next.
- `platform_files`: how a file is made durable on each platform. Nothing else syncs.
- `paths`: paths as users write them.
- `errors`: every error that Anabranch raises on purpose.
- `outputs`: what a command writes for its user. `text`: sizes and counts as people read them.
- `advisor`: which destinations should share a store. `activemq`: ActiveMQ's configuration, in and out.

It keeps nothing on disk. All values are immutable and may be used by any thread and after a fork.
"""
