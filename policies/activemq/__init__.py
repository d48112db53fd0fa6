"""ActiveMQ's configuration, in and out: which destinations share a journal, and how durable it is.

    from anabranch.policies.activemq import read_stores, write_mkahadb

    found = read_stores("activemq.xml", {"activemq.data": "/var/lib/activemq"})
    Path("stores.yaml").write_text(found.stores_yaml())
    print(write_mkahadb(load("advice/stores.yaml")).xml)       # for <broker> in activemq.xml

The reader takes the persistence adapter of an activemq.xml, `<kahaDB>` or `<mKahaDB>`, as XBean or as plain Spring
beans; nothing else of the broker. Options without a counterpart on the other side are listed, never dropped without a
word. Nothing is read but the file, and nothing of it is executed: document types, and with them entities, are refused,
and `#{...}` is not evaluated.

- `xml_reader`: XML with its lines, safely
- `placeholders`: `${...}` and where its values come from
- `adapters`: persistence adapters as ActiveMQ means them, from either spelling
- `reading`: from there to our stores; `writing`: the way back
- `choice`: which of several matching filters ActiveMQ takes, where that is sure
"""

from .placeholders import read_properties
from .reading import StoresFound, read_stores
from .writing import MKahaDB, write_mkahadb

__all__ = ["MKahaDB", "StoresFound", "read_properties", "read_stores", "write_mkahadb"]
