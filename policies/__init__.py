"""The ground floor: what goes where, and how durable it is. Imports nothing else of ours.

    from anabranch.policies.config import load
    from anabranch.policies.destination import Destination

    config = load("stores.yaml")                                   # every error at once, each with its line
    match = config.routes().route(Destination.parse("queue://orders.custom"))
    print(match.target.name, match.pattern.text, match.reason)     # the store, the pattern, why that one

- `destination`: a queue or a topic with a dotted name; composites.
- `wildcard`: patterns, their total order of precedence, tables of routes; `pattern_trie`: how a route is found.
- `durability`: the three sync policies and what each promises.
- `options`: of each kind of store of ours, and of transactions; `kinds`: where others come from.
- `config`: the YAML file and its models; docs/configuration.md is for its users. Beside it `config_models` (Config,
  StoreConfig), `config_options` (what options are made of), `config_checks` (what must hold between stores),
  `config_problems` (errors in the file's words), `config_yaml` (YAML with its lines), `config_schema` (JSON Schema).
- `units`: sizes and durations as people write them.
- `platform_files`: how a file is made durable on each platform. Nothing else syncs.
- `errors`: every error that Anabranch raises on purpose.
- `partitioning`: the advisor.
- `activemq`: ActiveMQ's configuration, in and out.

It keeps nothing on disk. All values are immutable and may be used by any thread and after a fork.
"""
