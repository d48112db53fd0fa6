"""ActiveMQ's configuration as stores.yaml, and stores.yaml as an mKahaDB. What WRITTEN says was loaded by an ActiveMQ
5.17, which routed as is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.policies.activemq import StoresFound, read_properties, read_stores, write_mkahadb
from anabranch.policies.activemq.choice import unsure
from anabranch.policies.activemq.placeholders import Placeholders
from anabranch.policies.activemq.writing import _WHOLE_FILE
from anabranch.policies.activemq.xml_reader import DEPTH_MAX, ELEMENTS_MAX, FILE_BYTES_MAX
from anabranch.policies.config import Config, StoreConfig, loads
from anabranch.policies.errors import ConfigError
from anabranch.policies.names.destination import Destination, Kind

BEANS = """<?xml version="1.0" encoding="UTF-8"?>
<beans xmlns="http://www.springframework.org/schema/beans"
       xmlns:p="http://www.springframework.org/schema/p">
  <broker xmlns="http://activemq.apache.org/schema/core" brokerName="toys" dataDirectory="${activemq.data}">
    <persistenceAdapter>
%s
    </persistenceAdapter>
  </broker>
</beans>
"""
MULTI = """<mKahaDB directory="${activemq.data}/kahadb" journalMaxFileLength="4mb">
<filteredPersistenceAdapters>
<filteredKahaDB queue="orders.>,topic://prices.*">
  <usage><storeUsage limit="1 gb"/></usage>
  <persistenceAdapter>
    <kahaDB journalMaxFileLength="${size:16mb}" enableJournalDiskSyncs="false" indexCacheSize="1000"
            archiveDataLogs="true" directoryArchive="${archive}" cleanupInterval="5000" mistyped="1"/>
  </persistenceAdapter>
</filteredKahaDB>
<filteredKahaDB topic="a-*.b">
  <persistenceAdapter>
    <kahaDB journalDiskSyncStrategy="periodic" journalDiskSyncInterval="500" checkpointInterval="2000"
            indexDirectory="/fast" journalMaxWriteBatchSize="2mb"/>
  </persistenceAdapter>
</filteredKahaDB>
<filteredKahaDB perDestination="true"><persistenceAdapter><kahaDB/></persistenceAdapter></filteredKahaDB>
</filteredPersistenceAdapters>
</mKahaDB>"""


def read(tmp_path: Path, adapter: str, **properties: str) -> StoresFound:
    return read_text(tmp_path, BEANS % adapter, **properties)


def read_text(tmp_path: Path, text: str, **properties: str) -> StoresFound:
    path = tmp_path / "activemq.xml"
    path.write_text(text)
    return read_stores(path, properties, {})


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        read_text(tmp_path, text)
    return str(error.value).replace(f"{tmp_path}/", "")


def config(*stores: StoreConfig) -> Config:
    return Config("data", list(stores))


def test_an_mkahadb_becomes_its_stores(tmp_path: Path) -> None:
    found = read(tmp_path, MULTI, archive="/slow")
    loaded = loads(found.stores_yaml(), tmp_path)
    assert list(found.stores) == [
        {
            "name": "orders",
            "match": ["queue://orders.>", "topic://prices.*"],
            "journal": {"sync": "never", "segment_size": "16MiB", "archive_directory": "/slow", "max_bytes": "1GiB"},
        },
        {
            "name": "a--.b",
            "match": ["topic://a-[*].b"],
            "index_directory": "/fast",
            "journal": {
                "sync": "periodic",
                "sync_interval": "500ms",
                "batch_bytes_max": "2MiB",
                "checkpoint_interval": "2s",
            },
        },
        {"name": "each", "match": [">"], "per_destination": True, "journal": {}},
    ]
    routes = loaded.routes()
    for name, store in (
        ("orders.a", "orders"),
        ("topic://prices.x", "orders"),
        ("topic://a-*.b", "a--.b"),
        ("q", "each"),
    ):
        match = routes.route(Destination.parse(name))
        assert match is not None and match.target.name == store


def test_what_has_no_counterpart_is_listed_with_its_line(tmp_path: Path) -> None:
    found = read(tmp_path, MULTI, archive="/slow")
    notes = {note.message.partition(" ")[0].partition("=")[0]: note.line for note in found.notes}
    assert notes["indexCacheSize"] == notes["cleanupInterval"] == notes["mistyped"] == 11
    assert notes["storeUsage:"] == 9
    assert notes["journalMaxFileLength:"] == notes["directory"] == 6
    assert notes["what"] == 0
    text = found.stores_yaml()
    assert all(note.message in text for note in found.notes)
    assert "# line 11: mistyped is no attribute of <kahaDB> in ActiveMQ 5.17, and is left out\n" in text


def test_a_kahadb_is_one_store(tmp_path: Path) -> None:
    found = read(tmp_path, '<kahaDB directory="${nobody.knows}" journalMaxFileLength="8mb"/>')
    assert found.stores == ({"name": "all", "match": [">"], "journal": {"segment_size": "8MiB"}},)
    assert "directory='${nobody.knows}' stays ActiveMQ's" in found.stores_yaml()


def test_plain_beans_and_references(tmp_path: Path) -> None:
    package = "org.apache.activemq.store.kahadb"
    found = read_text(
        tmp_path,
        f"""<beans xmlns:p="http://www.springframework.org/schema/p">
        <bean id="small" class="{package}.KahaDBPersistenceAdapter" p:journalMaxFileLength="1mb"/>
        <bean id="store" class="{package}.MultiKahaDBPersistenceAdapter">
          <property name="filteredPersistenceAdapters"><list>
            <bean class="{package}.FilteredKahaDBPersistenceAdapter">
              <property name="queue" value="a"/>
              <property name="persistenceAdapter" ref="small"/>
            </bean>
            <bean class="{package}.FilteredKahaDBPersistenceAdapter">
              <property name="topic"><value>b.></value></property>
              <property name="persistenceAdapter">
                <bean class="{package}.KahaDBPersistenceAdapter">
                  <property name="journalDiskSyncStrategy" value="NEVER"/>
                </bean>
              </property>
            </bean>
            <bean class="{package}.FilteredKahaDBPersistenceAdapter">
              <property name="persistenceAdapter"><ref bean="small"/></property>
            </bean>
          </list></property>
        </bean>
        <bean class="org.apache.activemq.broker.BrokerService"><property name="persistenceAdapter" ref="store"/></bean>
        </beans>""",
    )
    small = {"segment_size": "1MiB"}
    assert list(found.stores) == [
        {"name": "a", "match": ["queue://a"], "journal": small},
        {"name": "b", "match": ["topic://b.>"], "journal": {"sync": "never"}},
        {"name": "rest", "match": [">"], "journal": small},
    ]
    filtered = '<filteredKahaDB persistenceAdapter="#small"/>'
    by_attribute = read_text(
        tmp_path,
        '<beans><kahaDB id="small" journalMaxFileLength="1mb"/><mKahaDB><filteredPersistenceAdapters>'
        f"{filtered}</filteredPersistenceAdapters></mKahaDB></beans>",
    )
    assert by_attribute.stores == ({"name": "rest", "match": [">"], "journal": small},)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('<!DOCTYPE a [<!ENTITY x "y">]>\n<a>&x;</a>', "activemq.xml:1: document types"),
        ('<?xml version="1.0"?>\n<!DOCTYPE a SYSTEM "file:///etc/passwd">\n<a/>', "activemq.xml:2: document types"),
        ("<a>\n<b>\n</a>", "activemq.xml:3: not well-formed XML: mismatched tag"),
        ("", "activemq.xml:1: not well-formed XML: no element found"),
        ("stores: []", "activemq.xml:1: not well-formed XML: syntax error"),
        ("<a>&nothing;</a>", "activemq.xml:1: not well-formed XML: undefined entity"),
        ("<a>" * (DEPTH_MAX + 1), f"activemq.xml:1: elements nest more than {DEPTH_MAX} deep"),
        ("<a>" + "<b/>" * ELEMENTS_MAX + "</a>", f"activemq.xml:1: more than {ELEMENTS_MAX:,} elements"),
        ("<a>" + " " * FILE_BYTES_MAX, "activemq.xml: larger than 8 MiB"),
        ('<?xml version="1.0" encoding="nonsense"?><a/>', "unknown encoding"),
        ("<beans/>", "activemq.xml: no persistence adapter"),
        ("<b>\n<kahaDB/>\n<kahaDB/></b>", "activemq.xml: several persistence adapters, in lines 2, 3"),
        (BEANS % "<jdbcPersistenceAdapter/>", "activemq.xml:6: <jdbcPersistenceAdapter> cannot be converted"),
        (BEANS % "<mKahaDB/>", "activemq.xml:6: <mKahaDB> without any <filteredKahaDB>"),
        (BEANS % '\n<kahaDB journalMaxFileLength="much"/>', "activemq.xml:7: journalMaxFileLength: 'much': expected"),
        (BEANS % '<kahaDB enableJournalDiskSyncs="no"/>', "enableJournalDiskSyncs: 'no': expected true or false"),
        (BEANS % '<kahaDB checkpointInterval="1s"/>', "checkpointInterval: '1s': expected a number of milliseconds"),
        (BEANS % '<kahaDB journalDiskSyncStrategy="now"/>', "journalDiskSyncStrategy: 'now': expected always"),
        (BEANS % '<kahaDB journalMaxFileLength="${x}"/>', "${x} has no value; give it by --property x=VALUE"),
        (BEANS % '<kahaDB journalMaxFileLength="#{1+1}"/>', "is an expression, which is not evaluated"),
        ('<b><mKahaDB><filteredKahaDB persistenceAdapter="#gone"/></mKahaDB></b>', "refers to bean 'gone', which"),
        (
            '<b><mKahaDB><filteredKahaDB persistenceAdapter="#a"/></mKahaDB><kahaDB id="a" locker="#a"/></b>',
            "beans that refer to each other without end",
        ),
        (BEANS % '<mKahaDB><filteredKahaDB queue="a" topic="b"/></mKahaDB>', "queue and topic: ActiveMQ takes"),
        (BEANS % '<mKahaDB><filteredKahaDB queue="a.>.b"/></mKahaDB>', "`>` stands for the rest"),
        (BEANS % '<mKahaDB><filteredKahaDB queue="a,,b"/></mKahaDB>', "a destination needs a name"),
        (
            BEANS % '<mKahaDB><filteredKahaDB queue="a"/>\n<filteredKahaDB queue="a"/></mKahaDB>',
            "activemq.xml:7: queue://a is in line 6 already",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_told_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(tmp_path, text)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    told = refused(tmp_path, BEANS % '<kahaDB checkpointInterval="0" archiveDataLogs="perhaps"/>')
    assert told.count("activemq.xml:6: ") == 2


def test_values_out_of_our_range_become_the_nearest(tmp_path: Path) -> None:
    found = read(tmp_path, '<kahaDB journalMaxFileLength="1kb"/>')
    assert found.stores[0]["journal"] == {"segment_size": "64KiB"}
    assert "segment_size is 64KiB instead, which is the nearest" in found.stores_yaml()


def test_a_memory_adapter_and_filters_of_the_same_start(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        '<mKahaDB><filteredKahaDB queue="a.*"/><filteredKahaDB queue="a.>"/>'
        '<filteredKahaDB queue="x"><memoryPersistenceAdapter/></filteredKahaDB></mKahaDB>',
    )
    assert [store["name"] for store in found.stores] == ["a", "a-2", "x"]
    assert found.stores[2]["memory"] == {}
    text = found.stores_yaml()
    assert "queue://a.* and queue://a.> (line 6) may match the same destination" in text
    assert "no filter takes all destinations" in text


def test_where_placeholders_come_from(tmp_path: Path) -> None:
    known = Placeholders({"a": "${b}/x", "loop": "${loop}."}, {"b": "y", "a": "hidden"})
    assert known.resolve("${a}-${none:}-${c:d}") == "y/x--d"
    for text in ("${loop}", "${a", "${}", "${a${b}}"):
        with pytest.raises(ValueError, match=r"value|resolved"):
            known.resolve(text)
    path = tmp_path / "env"
    path.write_text(
        "# a comment\n"
        'ACTIVEMQ_DATA="/var/lib/x"\n'
        'export ACTIVEMQ_OPTS="-Xmx1G -Dactivemq.data=$ACTIVEMQ_DATA \\\n  -Dsize=2mb"\n'
        "plain.property: 7\nunbalanced='\n"
    )
    found = read_properties(path)
    assert found["ACTIVEMQ_DATA"] == "/var/lib/x"
    assert (found["size"], found["plain.property"]) == ("2mb", "7")
    with pytest.raises(ConfigError, match="no such file"):
        read_properties(tmp_path / "none")


WRITTEN = """<!--
  Made by `anabranch mkahadb` from stores.yaml. Put it into <broker> in place of its <persistenceAdapter>.
  A KahaDB that is there is not taken over: its messages stay where they are.
  store orders: max_bytes counts bytes of messages, storeUsage the files'
-->
<persistenceAdapter xmlns="http://activemq.apache.org/schema/core">
  <mKahaDB directory="${activemq.data}/mkahadb">
    <filteredPersistenceAdapters>
      <filteredKahaDB queue="orders.&gt;,topic://prices.*">
        <usage>
          <storeUsage limit="1073741824"/>
        </usage>
        <persistenceAdapter>
          <kahaDB directory="${activemq.data}/mkahadb/orders" journalMaxFileLength="512kb" \
journalDiskSyncStrategy="periodic" journalDiskSyncInterval="500"/>
        </persistenceAdapter>
      </filteredKahaDB>
      <filteredKahaDB queue="exact">
        <persistenceAdapter>
          <kahaDB directory="${activemq.data}/mkahadb/exact" journalMaxFileLength="70001" \
journalDiskSyncStrategy="never" checkpointInterval="2000" \
journalMaxWriteBatchSize="2mb" archiveDataLogs="true" directoryArchive="/arch/exact" indexDirectory="/idx/exact"/>
        </persistenceAdapter>
      </filteredKahaDB>
      <filteredKahaDB perDestination="true">
        <persistenceAdapter>
          <kahaDB directory="${activemq.data}/mkahadb/each" journalMaxFileLength="32mb" \
journalDiskSyncStrategy="always"/>
        </persistenceAdapter>
      </filteredKahaDB>
    </filteredPersistenceAdapters>
  </mKahaDB>
</persistenceAdapter>
"""
STORES = """
directory: data
stores:
- name: orders
  match: ["queue://orders.>", "topic://prices.*"]
  journal: {sync: periodic, sync_interval: 500ms, segment_size: 512KiB, max_bytes: 1GiB}
- name: exact
  match: ["queue://exact"]
  index_directory: /idx
  journal: {sync: never, segment_size: 70001, checkpoint_interval: 2s, batch_bytes_max: 2MiB, archive_directory: /arch}
- {name: each, match: [">"], per_destination: true}
"""


def test_stores_become_an_mkahadb(tmp_path: Path) -> None:
    written = write_mkahadb(loads(STORES, tmp_path))
    assert written.xml == WRITTEN
    assert written.notes == ("store orders: max_bytes counts bytes of messages, storeUsage the files'",)


def test_there_and_back(tmp_path: Path) -> None:
    found = read_text(tmp_path, write_mkahadb(loads(STORES, tmp_path)).xml)
    original, back = loads(STORES, tmp_path), loads(found.stores_yaml(), tmp_path)
    assert [store.match for store in back.stores] == [store.match for store in original.stores]
    assert [store.per_destination for store in back.stores] == [False, False, True]
    assert [store.options.model_dump(exclude={"archive_directory"}) for store in back.stores] == [
        store.options.model_dump(exclude={"archive_directory"}) for store in original.stores
    ]


def test_what_activemq_cannot_say_is_listed() -> None:
    written = write_mkahadb(
        config(
            StoreConfig("globs", ["queue://eu-*", "queue://a.[xy]"]),
            StoreConfig("some", ["queue://us-*", "queue://us.x[*]y", "map://m.>"], journal={"priorities": True}),
            StoreConfig("each", ["queue://each.>"], per_destination=True),
            StoreConfig("tables", ["topic://t--x"], sql={}),
        )
    )
    assert "store globs: ActiveMQ has no filter for its patterns; it is left out" in written.notes
    assert any(note.startswith("store some: queue://us-* has no counterpart") for note in written.notes)
    assert "store some: map://m.> has no counterpart: ActiveMQ has no maps" in written.notes
    assert any(note.startswith("store some: priorities: no attribute of <kahaDB>") for note in written.notes)
    assert any(note.startswith("store each: per_destination works in ActiveMQ for all") for note in written.notes)
    assert "store tables: a store of kind sql becomes a KahaDB with defaults" in written.notes
    assert any(note.startswith("no store takes all destinations") for note in written.notes)
    assert 'queue="us.x*y"' in written.xml
    assert "--" not in written.xml.removeprefix("<!--").partition("-->")[0]


def test_what_holds_for_the_whole_file_is_listed(tmp_path: Path) -> None:
    text = STORES.replace("- name: exact\n", "- name: exact\n  directory: /fast/exact\n  create_directory: true\n")
    text += "transactions: {timeout: 10s}\nusage: {}\ncreate_directory: false\nfile_mode: '0640'\ncontrol: false\n"
    plain = write_mkahadb(loads(STORES, tmp_path))
    written = write_mkahadb(loads(text, tmp_path))
    assert [note for note in written.notes if note not in plain.notes] == [
        "transactions: limits and timeouts of transactions are no attributes of <mKahaDB>",
        "usage: ActiveMQ records no usage; `anabranch recommend` reads what archiveDataLogs keeps (option from-kahadb)",
        "create_directory: ActiveMQ makes directories that are missing",
        "file_mode: ActiveMQ makes files as the broker's umask has them",
        "control: whoever looks into a broker asks it by JMX",
        "store exact: directory /fast/exact holds files of ours; ActiveMQ's are in ${activemq.data}/mkahadb/exact",
        "store exact: create_directory: ActiveMQ makes directories that are missing",
    ]
    assert set(Config.model_fields) - {"directory", "stores"} == set(_WHOLE_FILE)


def test_a_pattern_of_both_kinds_leaves_out_what_another_store_has_for_one() -> None:
    written = write_mkahadb(config(StoreConfig("both", ["b.>"]), StoreConfig("topics", ["topic://b.>"])))
    assert '<filteredKahaDB queue="b.&gt;">' in written.xml
    assert '<filteredKahaDB topic="b.&gt;">' in written.xml


@pytest.mark.parametrize(
    ("stores", "is_sure"),
    [
        ([["orders.>"], ["orders.a"]], True),
        ([["orders.>"], ["orders.eu.>"]], True),
        ([["orders.>"], ["telemetry.>"]], True),
        ([["a.>"], ["b.*", "c"]], True),
        ([["a.*"], ["a.>"]], False),
        ([["a.*.x"], ["a.b.*"]], False),
        ([["b.>", "c.>"], ["c.*"]], False),
        ([["b.*.>"], ["b.c"]], True),
        ([["b.*.>"], ["b.c.>"]], False),
    ],
)
def test_where_the_choice_of_activemq_is_sure(stores: list[list[str]], is_sure: bool) -> None:
    found = list(unsure([[(Kind.QUEUE, name) for name in store] for store in stores]))
    assert (found == []) == is_sure
